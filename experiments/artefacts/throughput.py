"""Relative throughput against the ratio: the paper's figure."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import paper, style
from .artefact import Artefact, Record, table, where_from
from .names import shown

FAMILIES = {
    "gaussian": "the paper's Gaussian",
    "gaussian, block": "Gaussian in blocks of 128",
    "rows": "rows",
}


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return a table for all models, and a panel for each."""
    figure, panels = style.panels(len(records), (5.2 * len(records), 4.5))
    for axes, record in zip(panels, records, strict=True):
        _draw(axes, record)
    style.legend(figure, panels[0], 2 * len(records))
    names = list(records[0]["results"])
    lines = [[shown(way), *(f"{record['results'][way]['relative']:.2f}" for record in records)] for way in names]
    settings = [record["settings"] for record in records]
    header = ["training", *(f"{each['model']}, {each['batch_size']} × {each['length']}" for each in settings)]
    text = (
        f"Samples a second beside exact training of the same model, whole steps with AdamW, "
        f"{settings[0]['threads']} threads, interleaved, the best of several. "
        f"The paper reports that its method is {paper.SPEED}, on a GPU.\n\n"
        f"{table(header, lines)}\n\n{where_from(records)}\n"
    )
    return text, figure


def _draw(axes, record: Record) -> None:  # type: ignore[no-untyped-def]
    results = record["results"]
    for family, label in FAMILIES.items():
        points = sorted((_ratio(way), found["relative"]) for way, found in results.items() if _family(way) == family)
        style_of = {"color": style.color(family), "linestyle": "--" if "block" in family else "-"}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=5, label=label, **style_of)
    ours = sorted((_ratio(way), found["relative"]) for way, found in results.items() if way.startswith("recommended"))
    axes.plot(
        *zip(*ours, strict=True), "D", color=style.color("recommended"), label="ours at these bytes", markersize=7
    )
    axes.axhline(1, color=style.QUIET, linewidth=1, linestyle=":")
    axes.set(xlabel="ratio", ylabel="relative throughput", title=record["cell"]["model"])


def _family(way: str) -> str:
    kind = way.replace(",", "").split()[0]
    return f"{kind}, block" if "block" in way else kind


def _ratio(way: str) -> float:
    return float(way.replace(",", "").split()[1])


ARTEFACT = Artefact("throughput", "Relative throughput against the ratio (figure)", ("throughput",), render)

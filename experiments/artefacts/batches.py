"""Memory against the batch size: the paper's figure."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import style
from .artefact import Artefact, Record, select, table, ways, where_from
from .names import shown

TASK = "MRPC"


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return a table of peaks and kept bytes, and both as curves over the batch size."""
    names = ways(records)
    sizes = sorted({record["cell"]["batch_size"] for record in records})
    figure, panels = style.panels(2, (10, 4.2))
    lines = []
    for way in names:
        found = [record for size in sizes for record in select(records, "memory", way=way, batch_size=size)]
        across = [record["cell"]["batch_size"] for record in found]
        for axes, quantity in zip(panels, ("peak_bytes", "kept_bytes"), strict=True):
            values = [record["results"][quantity] / 2**30 for record in found]
            label = shown(way).strip("*")
            axes.plot(
                across,
                values,
                "o--" if way.startswith("recommended") else "o-",
                color=style.color(way),
                alpha=style.shade(way),
                label=label,
                markersize=4,
            )
        lines.append([shown(way), *(f"{record['results']['peak_bytes'] / 2**20:,.0f} MiB" for record in found)])
    for axes, label in zip(panels, ("peak of a step, GiB", "kept for backward, GiB"), strict=True):
        axes.set(xlabel="batch size", ylabel=label, ylim=(0, None))
        axes.set_xticks(sizes)
    panels[0].legend(frameon=False, fontsize=9)
    model = records[0]["settings"]["model"]
    text = f"Peak of a step, {model} on {TASK}'s longest examples:\n\n"
    return text + table(["batch", *map(str, sizes)], lines) + f"\n\n{where_from(records)}\n", figure


ARTEFACT = Artefact(
    "batches", "Memory against the batch size (figure)", ("memory",), render, lambda labels: labels["task"] == TASK
)

"""Memory against the batch size: the paper's figure."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import style
from .artefact import MISSING, Artefact, Record, select, table, ways, where_from
from .names import ordered, shown

TASK = "MRPC"


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return a table of peaks and kept bytes, and both as curves over the batch size."""
    names = ordered(ways(records))
    sizes = sorted({record["cell"]["batch_size"] for record in records})
    figure, panels = style.panels(2, (10, 4.2))
    lines = []
    for way in names:
        found = [record for size in sizes for record in select(records, "memory", way=way, batch_size=size)]
        across = [record["cell"]["batch_size"] for record in found]
        for axes, quantity in zip(panels, ("peak_bytes", "kept_bytes"), strict=True):
            values = [record["results"][quantity] / 2**30 for record in found]
            axes.plot(across, values, label=shown(way).strip("*"), markersize=5, **style.line(way))
        peaks = {record["cell"]["batch_size"]: record["results"]["peak_bytes"] for record in found}
        lines.append([shown(way), *(f"{peaks[size] / 2**20:,.0f} MiB" if size in peaks else MISSING for size in sizes)])
    for axes, label in zip(panels, ("peak of a step, GiB", "kept for backward, GiB"), strict=True):
        axes.set(xlabel="batch size", ylabel=label, ylim=(0, None))
        axes.set_xticks(sizes)
    style.legend(figure, panels[0], 3)
    model = records[0]["settings"]["model"]
    text = f"Peak of a step, {model} on {TASK}'s longest examples:\n\n"
    return text + table(["batch", *map(str, sizes)], lines) + f"\n\n{where_from(records)}\n", figure


ARTEFACT = Artefact(
    "batches", "Memory against the batch size (figure)", ("memory",), render, lambda labels: labels["task"] == TASK
)

"""Whole steps as a picture, from the record alone: the peak of a step against its time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .contenders import CHECKPOINTING, EXACT
from .frontier_figure import STYLE
from .whole_step import PARTS
from .whole_step_subjects import DTYPES, SUBJECTS
from .whole_step_table import by_name
from .whole_step_ways import LINEAR, LORA, LORA_CHECKPOINTING, LORA_WHOLE, WHOLE, WHOLE_PRECISE

_QUIET, _GRID, _GUIDE = "#5b6570", "#e9ecef", "#8a949e"
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}
MARKS: dict[str, tuple[str, str]] = {  # name -> color and marker
    EXACT.name: ("#1b1f24", "o"),
    CHECKPOINTING.name: ("#2f6db5", "o"),
    LINEAR.name: ("#b3730a", "o"),
    WHOLE.name: ("#0b7a75", "o"),
    WHOLE_PRECISE.name: ("#0b7a75", "s"),
    LORA.name: ("#1b1f24", "^"),
    LORA_CHECKPOINTING.name: ("#2f6db5", "^"),
    LORA_WHOLE.name: ("#0b7a75", "^"),
}


def write_whole_step_figure(record: Path) -> list[Path]:
    """Draw the record beside itself, as SVG and as PNG."""
    paths = [record.with_suffix(suffix) for suffix in (".svg", ".png")]
    with rc_context(STYLE):
        figure = draw(json.loads(record.read_text()))
        for path in paths:
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def draw(record: Mapping[str, Any]) -> Figure:
    """Return the figure: a row of panels for each type, a panel for each model."""
    timed = [name for name in record["results"] if name in PARTS and not PARTS[name].deep]
    subjects = [name for name in SUBJECTS if any(PARTS[part].subject == name for part in timed)]
    dtypes = [name for name in DTYPES if any(PARTS[part].dtype == name for part in timed)]
    figure = Figure(figsize=(1.0 + 3.8 * len(subjects), 1.4 + 2.95 * len(dtypes)), facecolor="white")
    width, height = figure.get_size_inches()
    times = [entry["time"] for part in timed for entry in by_name(record, part).values()]
    for part in timed:
        column, line = subjects.index(PARTS[part].subject), dtypes.index(PARTS[part].dtype)
        bottom = 0.55 + 2.95 * (len(dtypes) - 1 - line)
        axes = figure.add_axes(((0.75 + 3.8 * column) / width, bottom / height, 3.2 / width, 2.2 / height))
        _draw_panel(axes, by_name(record, part))
        axes.set_xlim(min(times) - 0.05, max(times) + 0.05)
        title = f"{SUBJECTS[PARTS[part].subject].title}, {_SHORT[PARTS[part].dtype]}"
        axes.set_title(title, fontsize=11, weight="bold", loc="left")
        if line == len(dtypes) - 1:
            axes.set_xlabel("time of a step, exact = 1", color=_QUIET, fontsize=10)
        if column == 0:
            axes.set_ylabel("peak of a step, MiB", color=_QUIET, fontsize=10)
    left = 0.2 / width
    figure.text(left, 1 - 0.4 / height, _message(record, timed), fontsize=16, weight="bold")
    figure.text(left, 1 - 0.68 / height, _detail(record), fontsize=10, color=_QUIET)
    _draw_legend(figure, (0.08 / width, 1 - 0.76 / height))
    return figure


def _message(record: Mapping[str, Any], timed: list[str]) -> str:
    """Say the one thing to remember: what the whole step keeps, and what it costs in time."""
    shares, times = [], []
    for part in timed:
        entries = by_name(record, part)
        shares.append(entries[WHOLE.name]["kept"] / entries[EXACT.name]["kept"])
        times.append(entries[WHOLE.name]["time"])
    kept, time = (
        f"{low} to {high}" if low != high else low
        for low, high in (
            (f"{min(shares):.0%}", f"{max(shares):.0%}"),
            (f"{min(times):.2f}", f"{max(times):.2f}"),
        )
    )
    return f"The whole step keeps {kept} of what exact training keeps, in {time} of its time"


def _detail(record: Mapping[str, Any]) -> str:
    used = record["settings"]
    blocks = used["timed blocks"]
    detail = (
        f"Forward, backward and AdamW of {blocks} block{'s' * (blocks > 1)}, {used['threads']} "
        f"CPU thread{'s' * (used['threads'] > 1)}. The peak has weights, gradients, AdamW's states and activations."
    )
    busy = any(part["busy"] for part in record["results"].values())
    return f"{detail} Others used the machine: times are a first look." if busy else detail


def _draw_panel(axes: Axes, entries: Mapping[str, Mapping[str, Any]]) -> None:
    axes.axvline(1, color=_GUIDE, linewidth=1, linestyle=(0, (5, 4)), zorder=1)
    for name, (color, marker) in MARKS.items():
        if name in entries:
            place = entries[name]["time"], entries[name]["peak"] / 2**20
            bold = name == WHOLE.name
            size = 11 if bold else 8
            axes.plot(*place, marker, color=color, markersize=size, markeredgecolor="white", zorder=4 if bold else 3)
    axes.set_ylim(0, max(entry["peak"] for entry in entries.values()) / 2**20 * 1.12)
    axes.grid(color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, length=0, pad=6, labelsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_legend(figure: Figure, place: tuple[float, float]) -> None:
    dots = [
        Line2D([], [], color=color, marker=marker, markersize=8, linestyle="", markeredgecolor="white")
        for color, marker in MARKS.values()
    ]
    figure.legend(
        dots, list(MARKS), loc="upper left", bbox_to_anchor=place, ncols=len(MARKS), frameon=False, fontsize=10,
        handletextpad=0.1, columnspacing=1.2,
    )  # fmt: skip

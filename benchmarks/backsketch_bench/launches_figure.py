"""The counted launches as a picture, from the record alone: launches, traffic and estimated time beside exact."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .frontier_figure import STYLE
from .launches import ANY, FUSED, REFERENCE

_QUIET, _GRID, _EXACT = "#5b6570", "#e9ecef", "#1b1f24"
COLORS = {ANY: _EXACT, REFERENCE: "#b3730a", FUSED: "#0b7a75"}
LABELS = {REFERENCE: "packed by plain torch", FUSED: "packed by one fused kernel each way", ANY: "nothing packed"}
DTYPE = "bfloat16"
SHOWN = ("65536 x 1024 -> 1024", "Llama block, 4096 x 2048")
WAYS = ("exact", "rows at 0.1", "recommended", "8 bits", "4 bits", "3 bits, rotated", "2 bits, rotated")
DEVICE = "A100"
_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # the line of exact ends before a number
_SMALL: dict[str, Any] = {
    "textcoords": "offset points",
    "ha": "center",
    "fontsize": 8,
    "color": _QUIET,
    "bbox": _BEHIND,
}

Entry = Mapping[str, Any]


def write_launches_figure(record: Path) -> list[Path]:
    """Draw the record beside itself, as SVG and as PNG."""
    paths = [record.with_suffix(suffix) for suffix in (".svg", ".png")]
    with rc_context(STYLE):
        figure = draw(json.loads(record.read_text())["results"])
        for path in paths:
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def draw(entries: Sequence[Entry]) -> Figure:
    """Return the figure: a row of panels for each subject that is shown, a line for each way to train."""
    names = {entry["subject"]: None for entry in entries}
    shown = [name for name in SHOWN if name in names] or list(names)[:1]
    figure = Figure(figsize=(12.4, 1.1 + 2.75 * len(shown)), facecolor="white")
    height = figure.get_size_inches()[1]
    for line, subject in enumerate(shown):
        own = [each for each in entries if (each["subject"], each["dtype"]) == (subject, DTYPE) and each["way"] in WAYS]
        bottom = (0.2 + 2.75 * (len(shown) - 1 - line)) / height
        for column, (title, value) in enumerate(_measures(own[0]).items()):
            axes = figure.add_axes((0.16 + 0.285 * column, bottom, 0.255, 1.95 / height))
            _draw_panel(axes, own, value, labelled=column == 0)
            axes.set_title(title, fontsize=10.5, loc="left", color=_QUIET)
        figure.text(0.02, bottom + 2.28 / height, _described(subject), fontsize=11.5, weight="bold")
    figure.text(0.02, 1 - 0.42 / height, _message(entries, shown[0]), fontsize=17, weight="bold")
    detail = (
        f"One training step, forward and backward, in bf16. Counted on the meta device; the time is an estimate from "
        f"the {DEVICE}'s published limits and was never run."
    )
    figure.text(0.02, 1 - 0.72 / height, detail, fontsize=10, color=_QUIET)
    _draw_legend(figure, {each["path"] for each in entries}, 1 - 0.8 / height)
    return figure


def _measures(exact: Entry) -> dict[str, Callable[[Entry], float]]:
    return {
        "kernels launched": lambda entry: entry["launches"],
        "memory traffic, exact = 1": lambda entry: entry["bytes"] / exact["bytes"],
        f"estimated time on an {DEVICE}, exact = 1": lambda entry: entry["estimated_time"][DEVICE],
    }


def _message(entries: Sequence[Entry], subject: str) -> str:
    """Say the one thing to remember: what packing adds to a layer's step."""
    own = {
        (each["way"], each["path"]): each["launches"]
        for each in entries
        if (each["subject"], each["dtype"]) == (subject, DTYPE)
    }
    exact = own["exact", ANY]
    plain, fused = (own.get(("8 bits", path), exact) - exact for path in (REFERENCE, FUSED))
    if not fused:
        return f"Keeping a layer's input in 8 bits takes {plain} more kernels a step, without fused ones"
    return f"Fused, keeping a layer's input in 8 bits takes {fused} more kernels a step instead of {plain}"


def _described(subject: str) -> str:
    name = subject.replace("->", "→").replace(" x ", " rows × " if "block" in subject else " rows, ")
    return name if "block" in subject else f"one layer, {name}"


def _way(name: str) -> str:
    return f"all rows, {name}" if "bits" in name else name


def _draw_panel(axes: Axes, entries: Sequence[Entry], value: Callable[[Entry], float], *, labelled: bool) -> None:
    ways = [way for way in WAYS if any(each["way"] == way for each in entries)]
    for place, way in enumerate(ways):
        own = [each for each in entries if each["way"] == way]
        values = [value(each) for each in own]
        axes.plot(values, [place] * len(own), color=_GRID, linewidth=3, zorder=1, solid_capstyle="round")
        for each, number in zip(own, values, strict=True):
            axes.plot(number, place, "o", color=COLORS[each["path"]], markersize=7, zorder=3)
            text = f"{number:.0f}" if isinstance(number, int) else f"{number:.2f}"
            axes.annotate(text, (number, place), (0, 6), **_SMALL)
    axes.axvline(value(entries[0]), color="#8a949e", linewidth=1, linestyle=(0, (5, 4)), zorder=0)
    axes.set_xscale("log")
    axes.set_ylim(len(ways) - 0.5, -0.9)
    axes.set_yticks(range(len(ways)), [_way(way) for way in ways] if labelled else [""] * len(ways))
    axes.minorticks_off()
    axes.set_xticks([])
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.15, high * 1.15)
    axes.tick_params(colors=_QUIET, length=0, pad=6, labelsize=10)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _draw_legend(figure: Figure, paths: set[str], height: float) -> None:
    shown = [path for path in (ANY, REFERENCE, FUSED) if path in paths]
    dots = [Line2D([], [], color=COLORS[path], marker="o", markersize=7, linestyle="") for path in shown]
    names = [LABELS[path] for path in shown]
    figure.legend(dots, names, loc="upper left", bbox_to_anchor=(0.008, height), ncols=3, frameon=False, fontsize=10)

"""The demo's picture, from its record alone: memory, speed, and the validation loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .contenders import CHECKPOINTING, EXACT, PAPER, RECOMMENDED, ROWS, WHOLE
from .table import percent_above

_INK, _QUIET, _GUIDE, _FAINT = "#1b1f24", "#5b6570", "#8a949e", "#e9ecef"
_COLORS = {
    EXACT: "#3d4650",
    PAPER: "#c0392b",
    ROWS: "#d9820a",
    RECOMMENDED: "#7fb069",
    WHOLE: "#0b7a75",
    CHECKPOINTING: "#2f6db5",
}


def write_figure(record: Mapping[str, Any], path: Path) -> Path:
    """Draw the record and return the path of the picture."""
    with rc_context({"font.size": 10.5, "axes.edgecolor": _GUIDE, "text.color": _INK}):
        draw(record).savefig(path, dpi=160)
    return path


def draw(record: Mapping[str, Any]) -> Figure:
    """Return the figure of a record."""
    results, settings = record["results"], record["settings"]
    contenders = results["contenders"]
    figure = Figure(figsize=(13.2, 5.0), facecolor="white")
    _draw_memory(figure.add_axes((0.112, 0.14, 0.235, 0.61)), contenders, results["linear_share"])
    _draw_speed(figure.add_axes((0.385, 0.14, 0.2, 0.61)), contenders)
    _draw_loss(figure.add_axes((0.65, 0.14, 0.335, 0.61)), contenders)
    figure.text(0.012, 0.925, _headline(contenders), fontsize=16, weight="bold")
    size = settings["size"]
    what = f"A GPT over bytes, depth {size['layers']} and width {size['hidden']}, on Python's own standard library"
    how = f"{results['steps']} steps of {settings['batch']} × {size['length']} bytes, one of each way in turn"
    figure.text(0.012, 0.872, f"{what}: {how}.", fontsize=10, color=_QUIET)
    return figure


def _headline(contenders: Mapping[str, Any]) -> str:
    ours, exact = contenders.get(WHOLE, contenders[RECOMMENDED]), contenders[EXACT]
    text = f"{ours['name'].capitalize()}: {ours['kept_bytes'] / exact['kept_bytes']:.0%} of the bytes kept for backward"
    if ours["speed"] is not None:
        text += f", {ours['speed']:.2f} × the speed"
    return text if ours["loss_above_exact"] is None else f"{text}, {percent_above(ours['loss_above_exact'])} loss"


def _draw_memory(axes: Axes, contenders: Mapping[str, Any], share: float) -> None:
    _bars(axes, contenders, "kept for backward, MiB")
    unit = 2**20
    for place, (key, entry) in enumerate(contenders.items()):
        linear, kept = entry["linear_bytes"] / unit, entry["kept_bytes"] / unit
        axes.barh(place, linear, height=0.62, color=_COLORS[key])
        axes.barh(place, kept - linear, left=linear, height=0.62, color=_COLORS[key], alpha=0.28)
        axes.annotate(f"{kept:.3g}", (kept, place), (5, 0), **_beside())
    axes.set_xlim(0, max(entry["kept_bytes"] for entry in contenders.values()) / unit * 1.16)
    axes.set_xlabel(f"dark: for linear layers, {share:.0%} of exact; light: the rest", color=_QUIET, fontsize=9.5)


def _draw_speed(axes: Axes, contenders: Mapping[str, Any]) -> None:
    _bars(axes, contenders, "speed, exact = 1")
    axes.set_yticklabels([])
    for place, (key, entry) in enumerate(contenders.items()):
        if entry["speed"] is not None:
            axes.barh(place, entry["speed"], height=0.62, color=_COLORS[key])
            axes.annotate(
                f"{entry['speed']:.2f}", (entry["speed"], place), (-6, 0), color="white", ha="right", **_beside()
            )
    axes.axvline(1, color=_GUIDE, linewidth=1, linestyle=(0, (5, 4)))
    axes.set_xlim(0, max((entry["speed"] or 1.0) for entry in contenders.values()) * 1.06)
    axes.set_xlabel("median over all steps, side by side", color=_QUIET, fontsize=9.5)


def _draw_loss(axes: Axes, contenders: Mapping[str, Any]) -> None:
    _frame(axes, "validation loss, nats a byte")
    axes.set_xlabel("step", color=_QUIET, fontsize=9.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for key, entry in contenders.items():
        if entry["validation"]:
            steps, values = zip(*entry["validation"], strict=True)
            above = "" if key == EXACT else f"  {percent_above(entry['loss_above_exact'])}"
            axes.plot(steps, values, color=_COLORS[key], label=f"{entry['name']}{above}", **_line(key))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.3 * (high - low))  # room for the legend
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=10, loc="upper right")


def _line(key: str) -> dict[str, Any]:
    if key == CHECKPOINTING:  # lies on exact, whose numbers it repeats
        return {"linewidth": 1.6, "linestyle": (0, (1, 2)), "zorder": 5}
    width = 2.6 if key == WHOLE else 1.8
    return {"linewidth": width, "marker": "o", "markersize": 5, "markeredgecolor": "white"}


def _bars(axes: Axes, contenders: Mapping[str, Any], title: str) -> None:
    _frame(axes, title)
    axes.set_yticks(range(len(contenders)), [entry["name"] for entry in contenders.values()])
    for tick, key in zip(axes.get_yticklabels(), contenders, strict=True):
        tick.set_color(_COLORS[key])
        tick.set_fontweight("bold" if key == WHOLE else "normal")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK, pad=10)
    axes.grid(color=_FAINT, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, length=0, pad=6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _beside() -> dict[str, Any]:
    return {"textcoords": "offset points", "va": "center", "fontsize": 10}

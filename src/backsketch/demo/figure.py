"""The demo's picture, from its record alone: memory, speed, and the way down of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .contenders import CHECKPOINTING, EXACT, PAPER, RECOMMENDED, ROWS

_INK, _QUIET, _GUIDE, _FAINT = "#1b1f24", "#5b6570", "#8a949e", "#e9ecef"
_COLORS = {EXACT: "#3d4650", PAPER: "#c0392b", ROWS: "#d9820a", RECOMMENDED: "#0b7a75", CHECKPOINTING: "#2f6db5"}


def write_figure(record: Mapping[str, Any], path: Path) -> Path:
    """Draw the record and return the path of the picture."""
    with rc_context({"font.size": 10.5, "axes.edgecolor": _GUIDE, "text.color": _INK}):
        draw(record).savefig(path, dpi=160)
    return path


def draw(record: Mapping[str, Any]) -> Figure:
    """Return the figure of a record."""
    results, settings = record["results"], record["settings"]
    contenders = results["contenders"]
    figure = Figure(figsize=(13.2, 4.9), facecolor="white")
    memory = figure.add_axes((0.115, 0.13, 0.225, 0.64))
    speed = figure.add_axes((0.37, 0.13, 0.2, 0.64))
    loss = figure.add_axes((0.635, 0.13, 0.35, 0.64))
    _draw_memory(memory, contenders, results["linear_share"])
    _draw_speed(speed, contenders)
    _draw_loss(loss, contenders)
    figure.text(0.012, 0.925, _headline(contenders), fontsize=16, weight="bold")
    size = settings["size"]
    what = f"A GPT over bytes ({size['layers']} × {size['hidden']}) on the sources of Python's standard library"
    how = f"{results['steps']} steps of {settings['batch']} × {size['length']} bytes, one of each way in turn"
    figure.text(0.012, 0.872, f"{what}: {how}.", fontsize=9.5, color=_QUIET)
    return figure


def _headline(contenders: Mapping[str, Any]) -> str:
    ours, exact = contenders[RECOMMENDED], contenders[EXACT]
    text = f"{ours['linear_bytes'] / exact['linear_bytes']:.0%} of the linear inputs kept"
    if ours["speed"] is not None:
        text += f", {ours['speed']:.2f} × the speed"
    return text if ours["loss_above_exact"] is None else f"{text}, {ours['loss_above_exact']:+.1%} loss"


def _draw_memory(axes: Axes, contenders: Mapping[str, Any], share: float) -> None:
    _bars(axes, contenders, "kept for backward, MiB")
    unit = 2**20
    for place, (key, entry) in enumerate(contenders.items()):
        linear, rest = entry["linear_bytes"] / unit, (entry["kept_bytes"] - entry["linear_bytes"]) / unit
        axes.barh(place, linear, height=0.62, color=_COLORS[key])
        axes.barh(place, rest, left=linear, height=0.62, color=_COLORS[key], alpha=0.28)
        axes.annotate(f"{linear + rest:.0f}", (linear + rest, place), (5, 0), **_beside())
    axes.set_xlim(0, max(entry["kept_bytes"] for entry in contenders.values()) / unit * 1.16)
    note = f"dark: inputs of linear layers, {share:.0%} of what exact\ntraining keeps; light: all else"
    axes.annotate(note, (0, 1), (0, 4), xycoords="axes fraction", textcoords="offset points", **_small())


def _draw_speed(axes: Axes, contenders: Mapping[str, Any]) -> None:
    _bars(axes, contenders, "steps in the time of an exact one")
    axes.set_yticklabels([])
    for place, (key, entry) in enumerate(contenders.items()):
        if entry["speed"] is not None:
            axes.barh(place, entry["speed"], height=0.62, color=_COLORS[key])
            axes.annotate(f"{entry['speed']:.2f} ×", (entry["speed"], place), (5, 0), **_beside())
    axes.axvline(1, color=_GUIDE, linewidth=1, linestyle=(0, (5, 4)))
    axes.set_xlim(0, max((entry["speed"] or 1.0) for entry in contenders.values()) * 1.22)


def _draw_loss(axes: Axes, contenders: Mapping[str, Any]) -> None:
    _frame(axes)
    axes.set_xlabel("step", color=_QUIET)
    axes.annotate(
        "validation loss, nats a byte; faint: training",
        (0, 1), (0, 4), xycoords="axes fraction", textcoords="offset points", **_small(),
    )  # fmt: skip
    for key, entry in contenders.items():
        training = entry["training"]
        if key != CHECKPOINTING:  # the very numbers of exact training
            axes.plot(range(1, len(training) + 1), training, color=_COLORS[key], linewidth=0.8, alpha=0.22)
    for key, entry in contenders.items():
        if entry["validation"]:
            steps, values = zip(*entry["validation"], strict=True)
            style: dict[str, Any] = {"linewidth": 2.6 if key == RECOMMENDED else 1.8, "marker": "o", "markersize": 4}
            if key == CHECKPOINTING:
                style |= {"linestyle": (0, (2, 2)), "linewidth": 1.2, "marker": None}
            above = "" if key == EXACT else f" ({entry['loss_above_exact']:+.1%})"
            label = f"{entry['name']}: {values[-1]:.3f}{above}"
            axes.plot(steps, values, color=_COLORS[key], markeredgecolor="white", label=label, **style)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9.5, loc="upper right")


def _bars(axes: Axes, contenders: Mapping[str, Any], label: str) -> None:
    _frame(axes)
    axes.set_yticks(range(len(contenders)), [entry["name"] for entry in contenders.values()])
    for tick, key in zip(axes.get_yticklabels(), contenders, strict=True):
        tick.set_color(_COLORS[key])
        tick.set_fontweight("bold" if key == RECOMMENDED else "normal")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label, color=_QUIET)


def _frame(axes: Axes) -> None:
    axes.grid(color=_FAINT, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, length=0, pad=6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _beside() -> dict[str, Any]:
    return {"textcoords": "offset points", "va": "center", "fontsize": 10}


def _small() -> dict[str, Any]:
    return {"fontsize": 9.5, "color": _QUIET, "va": "bottom", "linespacing": 1.25}

"""The frontier as a picture, from its records alone: a panel for each record, bytes kept across, added noise upwards.

python benchmarks/frontier_figure.py RECORD [RECORD] [--before RECORD]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .frontier_curves import Curve, curves

_INK, _QUIET, _GUIDE = "#1b1f24", "#5b6570", "#8a949e"
STYLE: dict[Any, Any] = {"svg.hashsalt": "frontier", "font.size": 11, "axes.edgecolor": _GUIDE, "text.color": _INK}
_LEFT, _RIGHT, _BOTTOM, _TOP = 0.018, 1.05, 1.5e-3, 70
GUIDES = ((1.0, "like half the batch"), (0.1, "like a batch 9% smaller"))
Record = Mapping[str, Any]


def write_figure(records: Sequence[Path], before: Path | None = None) -> list[Path]:
    """Draw the records beside the first of them, as SVG and as PNG; ``before`` is of earlier storage."""
    paths = [records[0].with_suffix(suffix) for suffix in (".svg", ".png")]
    with rc_context(STYLE):
        earlier = None if before is None else json.loads(before.read_text())
        figure = draw([json.loads(record.read_text()) for record in records], earlier)
        for path in paths:
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def draw(records: Sequence[Record], before: Record | None = None) -> Figure:
    """Return the figure of one record, or of two side by side."""
    width = 9.6 if len(records) == 1 else 12.4
    figure = Figure(figsize=(width, 6.2), facecolor="white")
    left = 1.24 / width  # room for the label, whatever the width
    room = (0.99 - left) / len(records)
    for place, record in enumerate(records):
        axes = figure.add_axes((left + place * (room + 0.004), 0.115, room - 0.02, 0.7))
        _draw_panel(axes, record, before if place == 0 else None, first=place == 0, alone=len(records) == 1)
    used = records[0]["settings"]
    figure.text(0.02, 0.943, _message(records[0]), fontsize=17, weight="bold")
    what = (
        f"{used['model']}, trained for {used['steps']} steps on {used['data']}; mean of {used['layers']} linear layers"
    )
    padding = f"; {used['padding']:.0%} of the rows are padding" if used["padding"] else "; nothing is padded"
    figure.text(0.02, 0.9, what + padding, fontsize=10, color=_QUIET)
    return figure


def _message(record: Record) -> str:
    """Say the one thing to remember: what a tenth of the memory costs."""
    tenth = at_a_tenth(record)
    if tenth is None:
        return "What is kept for backward, and the gradient noise that costs"
    return f"A tenth of the memory for linear inputs: {_percent(tenth)} more gradient noise"


def at_a_tenth(record: Record) -> float | None:
    """Return the least noise of the settings that keep a tenth of the bytes, padding included."""
    points = record["results"]["budgets"].get("0.1", [])
    return min((point["noise"] for point in points if not point["masked"]), default=None)


def _draw_panel(axes: Axes, record: Record, before: Record | None, *, first: bool, alone: bool) -> None:
    dtype = record["settings"]["dtype"]
    _frame(axes, dtype, first=first)
    for value, text in GUIDES:
        axes.axhline(value, color=_GUIDE, linewidth=1, linestyle=(0, (5, 4)), zorder=1)
        if first:
            axes.annotate(
                text, (_RIGHT, value), (-4, -12), textcoords="offset points", ha="right", color=_QUIET, size=9
            )
    for curve in curves(record, before):
        _draw_curve(axes, curve, labelled=first)
    _draw_gain(axes, record)
    if not alone and (tenth := at_a_tenth(record)) is not None:
        title = f"in {dtype}: a tenth of the bytes, +{_percent(tenth)} noise"
        axes.set_title(title, fontsize=11.5, weight="bold", loc="left", color=_QUIET)


def _frame(axes: Axes, dtype: str, *, first: bool) -> None:
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel(f"share of the input's {dtype} bytes kept for backward", color=_QUIET)
    shares = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    axes.set_xticks(shares, [f"{share:.0%}" for share in shares])
    noises = (0.01, 0.1, 1, 10)
    axes.set_yticks(noises, ["+1%", "+10%", "+100%", "+1000%"] if first else [""] * len(noises))
    if first:
        axes.set_ylabel("extra gradient noise (variance),\nrelative to the noise a batch has anyway", color=_QUIET)
    axes.set(xlim=(_LEFT, _RIGHT), ylim=(_BOTTOM, _TOP))
    axes.minorticks_off()
    axes.tick_params(colors=_QUIET, length=0, pad=6)
    axes.grid(color="#e9ecef", linewidth=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_curve(axes: Axes, curve: Curve, *, labelled: bool) -> None:
    shares, noises = zip(*curve.points, strict=True)
    bold = curve.width > 2
    axes.plot(
        shares,
        noises,
        color=curve.color,
        marker=curve.marker,
        linestyle=curve.style,
        linewidth=curve.width,
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.8,
        zorder=4 if bold else 3,
    )
    if not labelled:
        return
    share, noise = min(curve.points, key=lambda point: (abs(math.log(point[0] / curve.near)), point[1]))
    axes.annotate(
        curve.label,
        (share, noise),
        curve.offset,
        textcoords="offset points",
        ha=curve.align,
        va="center",
        color=curve.color,
        fontsize=11 if bold else 10,
        weight="bold" if bold else "normal",
        linespacing=1.15,
    )


def _draw_gain(axes: Axes, record: Record) -> None:
    """Mark how much less noise there is where the paper's Gaussian keeps a tenth of the bytes."""
    points, best = record["results"]["points"], at_a_tenth(record)
    paper = [p["noise"] for p in points if p["family"] == "paper" and p["config"]["ratio"] == 0.1]
    if not paper or best is None:
        return
    arrow = {"arrowstyle": "-|>", "color": _INK, "linewidth": 1.3}
    axes.annotate("", (0.1, best * 1.15), (0.1, paper[0] / 1.2), arrowprops=arrow, zorder=5)
    place: dict[str, Any] = {"textcoords": "offset points", "va": "center", "linespacing": 1.25, "fontsize": 10.5}
    axes.annotate(f"{_figures(paper[0] / best)}× less\nnoise", (0.1, 1.75), (7, 0), weight="bold", **place)


def _percent(noise: float) -> str:
    return f"{_figures(100 * noise)}%"


def _figures(value: float) -> str:
    """Write a number with at most two figures: 5.1, 67, 250."""
    return f"{float(f'{value:.2g}'):g}"


def main() -> None:
    """Draw records anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--before", type=Path, help="record of earlier storage, for a curve in the first panel")
    given = parser.parse_args()
    for path in write_figure(given.records, given.before):
        print(f"wrote {path}")

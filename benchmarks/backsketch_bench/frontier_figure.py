"""The frontier as a picture, from its record alone: bytes kept across, added noise upwards.

python benchmarks/frontier_figure.py benchmarks/reports/frontier.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_INK, _QUIET, _GUIDE, _PAPER, _FEW = "#1b1f24", "#5b6570", "#8a949e", "#c0392b", "#0b7a75"
_LEFT, _RIGHT, _BOTTOM, _TOP = 0.0068, 1.08, 7e-5, 60


@dataclass(frozen=True, slots=True)
class Curve:
    """How a family is drawn, and where its label stands: ``offset`` points from the point at ``place``."""

    family: str
    label: str
    color: str
    marker: str
    place: int
    offset: tuple[float, float]
    align: str = "left"
    width: float = 1.6
    style: str = "-"


CURVES = (
    Curve("hadamard", "", "#b9c0c8", "D", -1, (0, 0)),
    Curve("hash", "", "#b9c0c8", "P", -1, (0, 0)),
    Curve("rows", "rows, hash,\nblocked Hadamard", "#76818c", "o", 0, (-9, -10), "right"),
    Curve("rows mask", "rows, padding left out", "#3d4650", "o", -1, (0, -17), "center"),
    Curve("2 bits mask", "rows in 2 bits", "#d9820a", "v", 0, (0, 9)),
    Curve("8 bits mask", "rows in 8 bits", "#2f6db5", "^", -1, (9, -4)),
    Curve("4 bits", "4 bits, padding kept", _FEW, "o", -1, (9, -3), "left", 1.3, "--"),
    Curve("4 bits mask", "rows in 4 bits", _FEW, "o", -3, (-2, -21), "right", 2.8),
    Curve("paper", "the paper's Gaussian: the line to beat", _PAPER, "s", 1, (6, 8), "left", 2.8),
)
GUIDES = ((1.0, "as noisy as SGD itself: like half the batch"), (0.1, "a batch 9% smaller: invisible in training"))


def write_figure(record: Path) -> list[Path]:
    """Draw the record beside itself, as SVG and as PNG."""
    paths = [record.with_suffix(suffix) for suffix in (".svg", ".png")]
    with rc_context({"svg.hashsalt": "frontier", "font.size": 11, "axes.edgecolor": _GUIDE, "text.color": _INK}):
        figure = draw(json.loads(record.read_text()))
        for path in paths:
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def draw(record: Mapping[str, Any]) -> Figure:
    """Return the figure of a record."""
    figure = Figure(figsize=(9.6, 6.0), facecolor="white")
    axes = figure.add_axes((0.09, 0.1, 0.88, 0.76))
    points = record["results"]["points"]
    _frame(axes)
    for value, text in GUIDES:
        axes.axhline(value, color=_GUIDE, linewidth=1, linestyle=(0, (5, 4)), zorder=1)
        axes.annotate(text, (_LEFT, value), (6, -13), textcoords="offset points", color=_QUIET, fontsize=9.5)
    for curve in CURVES:
        _draw_curve(axes, curve, sorted((p["bytes"], p["noise"]) for p in points if p["family"] == curve.family))
    _draw_gain(axes, points)
    used = record["settings"]
    figure.text(0.025, 0.945, "Few bits beat fewer rows", fontsize=17, weight="bold")
    what = f"{used['model']} fine-tuned for {used['steps']} steps on {used['data']}"
    detail = f"mean of {used['layers']} linear layers. {used['padding']:.0%} of the rows are padding"
    figure.text(0.025, 0.9, f"{what}, {detail}; rows in few bits leave it out.", fontsize=9.5, color=_QUIET)
    return figure


def _frame(axes: Axes) -> None:
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("kept for backward, share of the fp32 input", color=_QUIET)
    axes.set_ylabel("noise added to ∂W, relative to SGD's own", color=_QUIET)
    shares = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    axes.set_xticks(shares, [f"{share:.0%}" for share in shares])
    noises = (0.0001, 0.001, 0.01, 0.1, 1, 10)
    axes.set_yticks(noises, [f"{noise:g}" if noise > 0.0001 else "0.0001" for noise in noises])
    axes.set(xlim=(_LEFT, _RIGHT), ylim=(_BOTTOM, _TOP))
    axes.minorticks_off()
    axes.tick_params(colors=_QUIET, length=0, pad=6)
    axes.grid(color="#e9ecef", linewidth=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_curve(axes: Axes, curve: Curve, points: list[tuple[float, float]]) -> None:
    if len(points) < 3:
        return
    shares, noises = zip(*points, strict=True)
    bold = curve.width > 2
    axes.plot(
        shares,
        noises,
        color=curve.color,
        marker=curve.marker,
        linestyle=curve.style,
        linewidth=curve.width,
        markersize=7 if bold else 5,
        markeredgecolor="white",
        markeredgewidth=0.8,
        zorder=4 if bold else 3,
    )
    axes.annotate(
        curve.label,
        points[curve.place],
        curve.offset,
        textcoords="offset points",
        ha=curve.align,
        color=curve.color,
        fontsize=11 if bold else 10,
        weight="bold" if bold else "normal",
        linespacing=1.15,
    )


def _draw_gain(axes: Axes, points: list[dict[str, Any]]) -> None:
    """Mark how much less noise 4 bits add where the paper's Gaussian keeps a tenth of the bytes."""
    paper = [p["noise"] for p in points if p["family"] == "paper" and math.isclose(p["config"]["ratio"], 0.1)]
    best, kept = (_within_tenth(points, family) for family in ("4 bits mask", "4 bits"))
    if not paper or best is None or kept is None:
        return
    start, end = (best["bytes"], paper[0] / 1.35), (best["bytes"], best["noise"] * 1.4)
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": _INK, "linewidth": 1.3})
    gain, gain_kept = paper[0] / best["noise"], paper[0] / kept["noise"]
    text = f"{gain:.0f}× less noise in the same bytes\n({gain_kept:.0f}× with padding kept)"
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "top", "linespacing": 1.3}
    axes.annotate(text, (best["bytes"], best["noise"]), (-2, -27), fontsize=10, **place)


def _within_tenth(points: list[dict[str, Any]], family: str) -> dict[str, Any] | None:
    few = [point for point in points if point["family"] == family and point["bytes"] <= 0.1]
    return max(few, key=lambda point: point["bytes"], default=None)


def main() -> None:
    """Draw a record anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    for path in write_figure(parser.parse_args().record):
        print(f"wrote {path}")

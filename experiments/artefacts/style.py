"""How the figures look: colours by way, quiet axes."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

INK, QUIET = "#1b1f24", "#5b6570"
_COLORS = {
    "exact": INK,
    "gaussian": "#c0392b",
    "rademacher": "#d9820a",
    "cosine": "#8e5ea2",
    "fourier": "#2f6db5",
    "rows": "#76818c",
    "recommended": "#0b7a75",
}


def color(way: str) -> str:
    """Return the colour of a way, by its first word."""
    return _COLORS.get(way.replace(",", "").split()[0], QUIET)


def line(way: str) -> dict[str, Any]:
    """Return how a way's line is drawn: its colour by kind, its dashes and marks by ratio."""
    ratio = next((word for word in way.replace(",", "").split() if word in _RATIOS), "")
    dashes, marker, strength = _RATIOS.get(ratio, ("-", "o", 1.0))
    if way.startswith("recommended"):  # often on top of another
        dashes, marker = (0, (4, 3)), "D"
    return {"color": _lighter(color(way), strength), "linestyle": dashes, "marker": marker}


_RATIOS: dict[str, tuple[Any, str, float]] = {
    "0.1": ("-", "o", 1.0),
    "0.2": ("--", "s", 0.8),
    "0.5": ("-.", "^", 0.6),
    "0.9": (":", "v", 0.45),
}


def _lighter(name: str, strength: float) -> tuple[float, ...]:
    return tuple(1 - strength * (1 - part) for part in to_rgb(name))


def legend(figure: Figure, axes: Axes, columns: int) -> None:
    """Name the lines of one panel below all of them."""
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
        handlelength=3.6,
    )


def panels(count: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels side by side."""
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for each in axes:
        each.grid(color="#e9ecef", linewidth=0.9)
        each.set_axisbelow(True)
        each.tick_params(colors=QUIET, length=0)
        for side in ("top", "right"):
            each.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            each.spines[side].set_color("#c5ccd3")
    return figure, list(axes)

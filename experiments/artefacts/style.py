"""How the figures look: colours by way, quiet axes."""

from __future__ import annotations

from matplotlib.axes import Axes
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


def shade(way: str) -> float:
    """Return how opaque a way is drawn: the smaller its ratio the more."""
    numbers = [float(word) for word in way.replace(",", "").split() if word.replace(".", "", 1).isdigit()]
    return 1.0 if not numbers else max(0.35, 1.0 - numbers[0] * 0.8)


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

"""The paper's figures from the monitor's records: ratio of variances with its bound, both variances, alignment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from .monitor.estimates import QUANTITIES
from .monitor.noise_records import Record, ratios

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("backsketch.plots needs matplotlib: pip install 'backsketch[cli]'") from error

_SKETCH, _BATCH, _BOUND, _ABOVE = "#1f6f8b", "#d98e04", "#6b6b6b", "#b3261e"
_OTHERS = ("#8e5ea2", "#4f8f3a", "#a05a2c", "#3b4a8f")


def noise_figure(
    records: Sequence[Record],
    layer: str | None = None,
    window: int = 1,
    others: Mapping[str, Sequence[Record]] | None = None,
) -> Figure:
    """Draw three panels over steps: both sides of Theorem 1, D² of the sketch and of the batch, and α.

    Steps at which the ratio is above the bound, so that Theorem 1 fails, are marked. Estimates that are not positive
    have no place on the logarithmic axes and leave a gap; α is drawn as it comes.

    Args:
        records: from ``NoiseMonitor.to_records()``.
        layer: the layer to draw; by default the sum of all, which is the noise of the whole gradient.
        window: average so many steps before a ratio is taken: single steps scatter.
        others: name -> records of further runs, whose ratio and D² are drawn beside.
    """
    steps, curves = _curves(_totals(records, layer), window)
    figure = Figure(figsize=(9 if others else 7, 8), layout="constrained")
    ratio, variances, alignment = figure.subplots(3, 1, sharex=True)
    _draw_ratio(ratio, steps, curves)
    _line(variances, steps, curves["sgd_variance"], "batch: $D^2_{SGD}$", _BATCH)
    _line(variances, steps, curves["sketch_variance"], "sketch: $D^2$", _SKETCH)
    for (name, further), color in zip((others or {}).items(), itertools.cycle(_OTHERS), strict=False):
        own_steps, own = _curves(_totals(further, layer), window)
        _line(ratio, own_steps, own["scaled_ratio"], name, color, "-.")
        _line(variances, own_steps, own["sketch_variance"], f"{name}: $D^2$", color, "-.")
    alignment.plot(steps, curves["alignment"], color=_SKETCH)
    for axes, label in ((ratio, "ratio of variances"), (variances, "variance")):
        axes.set(ylabel=label, yscale="log")
        axes.legend(frameon=False, **({"loc": "center left", "bbox_to_anchor": (1, 0.5)} if others else {}))
    alignment.set(ylabel=r"alignment $\alpha$", xlabel="step")
    for axes in figure.axes:
        axes.grid(alpha=0.25)
    ratio.set_title("all layers" if layer is None else f"layer {layer}")
    return figure


def _draw_ratio(axes: Axes, steps: list[int], curves: dict[str, list[float]]) -> None:
    ratio, bound = curves["scaled_ratio"], curves["bound"]
    _line(axes, steps, ratio, r"$\frac{B_{proj}}{B-1}\,D^2 / D^2_{SGD}$", _SKETCH)
    _line(axes, steps, bound, r"bound $(\alpha+1)/\alpha$", _BOUND, "--")
    failing = [(step, value) for step, value, limit in zip(steps, ratio, bound, strict=True) if 0 < limit < value]
    if failing:
        axes.plot(*zip(*failing, strict=True), "o", color=_ABOVE, markersize=4, label="above the bound")


def _line(axes: Axes, steps: list[int], values: list[float], label: str, color: str, style: str = "-") -> None:
    axes.plot(steps, [value if value > 0 else math.nan for value in values], style, label=label, color=color)


def _totals(records: Sequence[Record], layer: str | None) -> dict[int, dict[str, float]]:
    """Add up the chosen records by step."""
    names = sorted({str(record["layer"]) for record in records})
    if layer is not None and layer not in names:
        raise ValueError(f"layer must be one of {', '.join(names)}, got {layer!r}")
    if not records:
        raise ValueError("records must not be empty, got none")
    steps: dict[int, dict[str, float]] = {}
    for record in records:
        if layer is None or record["layer"] == layer:
            total = steps.setdefault(int(record["step"]), dict.fromkeys(QUANTITIES, 0.0))
            for name in QUANTITIES:
                total[name] += float(record[name])
    return dict(sorted(steps.items()))


def _curves(totals: dict[int, dict[str, float]], window: int) -> tuple[list[int], dict[str, list[float]]]:
    """Average over windows of steps and take the ratios; a window is drawn at its last step."""
    if isinstance(window, bool) or window < 1:
        raise ValueError(f"window must be a positive integer, got {window!r}")
    steps, values = list(totals), list(totals.values())
    windows = [values[max(0, end - window) : end] for end in range(min(window, len(values)), len(values) + 1)]
    means = [ratios({name: sum(v[name] for v in own) / len(own) for name in QUANTITIES}) for own in windows]
    return steps[-len(means) :], {name: [mean[name] for mean in means] for name in means[0]}

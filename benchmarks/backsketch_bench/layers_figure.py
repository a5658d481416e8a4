"""The noise of each layer as a picture, from a record alone: with and without rotation, by its outliers.

python benchmarks/layers_figure.py benchmarks/reports/frontier-lm.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .frontier_figure import STYLE

_QUIET, _PLAIN, _ROTATED = "#5b6570", "#b3730a", "#0b7a75"
SHOWN = (("3 bits", "without rotation", _PLAIN), ("3 bits rotated", "rotated", _ROTATED))
NAMED = 2


def write_layers_figure(record: Path) -> list[Path]:
    """Draw the record beside itself, as SVG and as PNG, with ``-layers`` in the name."""
    paths = [record.with_name(f"{record.stem}-layers{suffix}") for suffix in (".svg", ".png")]
    with rc_context(STYLE):
        figure = draw_layers(json.loads(record.read_text()))
        for path in paths:
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def draw_layers(record: Mapping[str, Any]) -> Figure:
    """Return the figure: a dot for each layer and storage, all rows in 3 bits."""
    layers, used = record["results"]["layers"], record["settings"]
    figure = Figure(figsize=(9.6, 5.4), facecolor="white")
    axes = figure.add_axes((0.11, 0.11, 0.86, 0.7))
    largest = [layer["largest"] for layer in layers.values()]
    for key, label, color in SHOWN:
        noises = [layer[key] for layer in layers.values()]
        axes.plot(largest, noises, "o", color=color, markersize=5, markeredgecolor="white", markeredgewidth=0.5)
        mean = sum(noises) / len(noises)
        axes.axhline(mean, color=color, linewidth=1.4, zorder=1)
        place: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "bottom", "weight": "bold"}
        axes.annotate(f"{label}: mean +{100 * mean:.2g}%", (4.8 * max(largest), mean), (0, 3), color=color, **place)
    _name_the_worst(axes, layers)
    _frame(axes, min(largest), max(largest))
    figure.text(0.02, 0.935, "Rotation takes the outliers out of the noise", fontsize=17, weight="bold")
    detail = f"{used['model']} in {used['dtype']}, {used['layers']} linear layers, all rows kept in 3 bits"
    figure.text(0.02, 0.88, detail, fontsize=10, color=_QUIET)
    return figure


def _name_the_worst(axes: Axes, layers: Mapping[str, Mapping[str, float]]) -> None:
    worst = sorted(layers, key=lambda name: -layers[name]["3 bits"])[:NAMED]
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "fontsize": 9.5, "color": _PLAIN}
    for name in worst:
        short = name.removeprefix("model.")
        axes.annotate(short, (layers[name]["largest"], layers[name]["3 bits"]), (4, 7), **place)


def _frame(axes: Axes, least: float, most: float) -> None:
    axes.set(xscale="log", yscale="log", xlim=(least / 1.2, 5 * most), ylim=(0.005, 0.5))
    axes.set_xlabel("largest value of the layer's input, relative to its root mean square", color=_QUIET)
    axes.set_ylabel("extra gradient noise (variance),\nrelative to the noise a batch has anyway", color=_QUIET)
    ticks = [tick for tick in (5, 10, 20, 50, 100, 200, 500) if tick > least / 1.2]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks((0.01, 0.03, 0.1, 0.3), ["+1%", "+3%", "+10%", "+30%"])
    axes.tick_params(colors=_QUIET, length=0, pad=6)
    axes.minorticks_off()
    axes.grid(color="#e9ecef", linewidth=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Draw a record's layers anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    for path in write_layers_figure(parser.parse_args().record):
        print(f"wrote {path}")

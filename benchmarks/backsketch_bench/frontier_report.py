"""The frontier's record as tables for the documentation.

python benchmarks/frontier_report.py benchmarks/reports/frontier.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backsketch.config import STORED_BITS

WORST_LAYERS = 5
SHOWN: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("paper", (0.5, 0.2, 0.1)),
    ("gaussian", (0.1,)),
    ("hadamard", (0.1,)),
    ("hash", (0.1,)),
    ("rows", (0.5, 0.1)),
    ("rows mask", (0.5, 0.1)),
    ("8 bits", (1.0,)),
    ("8 bits rotated", (1.0,)),
    ("8 bits rotated mask", (0.7,)),
    ("4 bits", (1.0,)),
    ("4 bits rotated", (1.0,)),
    ("4 bits rotated mask", (0.7,)),
    ("3 bits", (1.0,)),
    ("3 bits rotated", (1.0, 0.5)),
    ("3 bits rotated mask", (0.7, 0.5)),
    ("3 bits rotated center", (1.0, 0.5)),
    ("2 bits", (1.0,)),
    ("2 bits rotated", (1.0, 0.5)),
    ("2 bits rotated mask", (0.7, 0.5, 0.2)),
)
Point = Mapping[str, Any]


def settings_table(record: Mapping[str, Any]) -> str:
    """Return the settings worth comparing, as Markdown: what they keep, the noise they add, the time they take."""
    titles = ("setting", "padding", "bytes kept", "noise / SGD's noise", "over layers", "step time")
    rows = (
        (
            _name(point),
            "left out" if point["masked"] else "sketched",
            f"{point['bytes']:.1%}",
            _short(point["noise"]),
            f"{_short(point['least'])}–{_short(point['most'])}",
            f"{point['time']:.2f}",
        )
        for point in _shown(record["results"]["points"])
    )
    return _markdown(titles, rows)


def budget_table(record: Mapping[str, Any], *, masked: bool) -> str:
    """Return, as Markdown, what each number of bits adds at each budget of bytes, with as many rows as fit.

    The last columns are the least that is possible without rotation, and the worst layer of the bold setting.
    """
    titles = ("bytes", *(f"{bits} bits" for bits in STORED_BITS), "best without rotation", "worst layer of the best")
    rows = []
    for budget, points in record["results"]["budgets"].items():
        own = [point for point in points if point["masked"] is masked]
        rotated = {point["config"]["bits"]: point for point in own if point["config"]["rotate"]}
        best = min(rotated.values(), key=lambda point: point["noise"])
        cells = [_marked(_short(rotated[bits]["noise"]), rotated[bits] is best) for bits in STORED_BITS]
        plain = min(point["noise"] for point in own if not point["config"]["rotate"])
        rows.append((f"{float(budget):.1%}", *cells, _short(plain), _short(best["most"])))
    return _markdown(titles, rows)


def worst_layers_table(record: Mapping[str, Any], by: str) -> str:
    """Return, as Markdown, the layers with most noise of all rows in the storage ``by``, such as "3 bits rotated"."""
    titles = ("layer", "largest value / r.m.s.", "3 bits", "3 bits, rotated")
    layers = record["results"]["layers"]
    worst = sorted(layers, key=lambda name: -layers[name][by])[:WORST_LAYERS]
    numbers = ("largest", "3 bits", "3 bits rotated")
    return _markdown(titles, ((f"`{name}`", *(_short(layers[name][each]) for each in numbers)) for name in worst))


def _markdown(titles: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def _shown(points: Sequence[Point]) -> Iterator[Point]:
    for family, ratios in SHOWN:
        for ratio in ratios:
            yield from (p for p in points if p["family"] == family and p["config"]["ratio"] == ratio)


def _name(point: Point) -> str:
    config = point["config"]
    if point["family"] == "paper":
        return f"the paper's Gaussian, ratio {config['ratio']:g}"
    options = [f'kind="{config["kind"]}"'] if config["kind"] != "rows" else []
    options += [f"{name}={config[name]}" for name in ("ratio", "block", "bits") if name in config]
    options += [f"{name}=True" for name in ("rotate", "center") if config[name]]
    return f"`{', '.join(options)}`"


def _marked(text: str, best: bool) -> str:
    return f"**{text}**" if best else text


def _short(value: float) -> str:
    """Write a noise with two figures, and never with an exponent."""
    decimals = max(0, 1 - math.floor(math.log10(float(f"{value:.1e}"))))
    return f"{value:.{decimals}f}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    record = json.loads(parser.parse_args().record.read_text())
    print(settings_table(record), budget_table(record, masked=False), sep="\n\n")
    if record["settings"]["padding"]:
        print("", budget_table(record, masked=True), sep="\n")
    for by in ("3 bits", "3 bits rotated"):
        print("", worst_layers_table(record, by), sep="\n")

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

SHOWN: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("paper", (0.5, 0.2, 0.1)),
    ("gaussian", (0.1,)),
    ("hadamard", (0.1,)),
    ("hash", (0.1,)),
    ("rows", (0.5, 0.1)),
    ("rows mask", (0.5, 0.1)),
    ("8 bits", (1.0,)),
    ("8 bits mask", (0.7,)),
    ("4 bits", (1.0, 0.85, 0.5)),
    ("4 bits mask", (0.85, 0.7, 0.5, 0.35, 0.2)),
    ("4 bits center", (1.0, 0.5)),
    ("2 bits", (1.0,)),
    ("2 bits mask", (0.7,)),
)


def settings_table(record: Mapping[str, Any]) -> str:
    """Return the settings worth comparing, as Markdown: what they keep, the noise they add, the time they take."""
    titles = ("setting", "padding", "bytes kept", "noise / SGD's noise", "over layers", "step time")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for point in _shown(record["results"]["points"]):
        noises = f"{_short(point['noise'])} | {_short(point['least'])}–{_short(point['most'])}"
        padding = "left out" if point["masked"] else "sketched"
        lines.append(f"| {_name(point)} | {padding} | {point['bytes']:.1%} | {noises} | {point['time']:.2f} |")
    return "\n".join(lines)


def budget_table(record: Mapping[str, Any]) -> str:
    """Return, as Markdown, what 8, 4 and 2 bits add at each budget of bytes, with as many rows as fit."""
    titles = [f"{bits} bits{rest}" for rest in ("", ", padding left out") for bits in (8, 4, 2)]
    lines = [f"| bytes | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for budget, points in record["results"]["budgets"].items():
        ordered = sorted(points, key=lambda point: (point["masked"], -point["config"]["bits"]))
        best = {masked: min(p["noise"] for p in points if p["masked"] is masked) for masked in (False, True)}
        cells = (_marked(_short(p["noise"]), p["noise"] == best[p["masked"]]) for p in ordered)
        lines.append(f"| {float(budget):.1%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(points: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for family, ratios in SHOWN:
        for ratio in ratios:
            yield next(p for p in points if p["family"] == family and p["config"]["ratio"] == ratio)


def _name(point: Mapping[str, Any]) -> str:
    config = point["config"]
    if point["family"] == "paper":
        return f"the paper's Gaussian, ratio {config['ratio']:g}"
    options = [f'kind="{config["kind"]}"'] if config["kind"] != "rows" else []
    options += [f"{name}={config[name]}" for name in ("ratio", "block", "bits") if name in config]
    options += ["center=True"] if config["center"] else []
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
    print(settings_table(record), budget_table(record), sep="\n\n")

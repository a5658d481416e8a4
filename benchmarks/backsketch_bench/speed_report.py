"""Render the speed record: the plot of all kinds, and a dated report in Markdown. Reads only the record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .contenders import RATIOS
from .speed_tables import sections


def render(path: Path) -> list[Path]:
    """Write the plot and the report beside the record and return their paths."""
    record = json.loads(path.read_text())
    written = []
    if "kinds" in record["results"]:
        written.append(_plot(record["results"]["kinds"], path.with_suffix(".png")))
    report = path.parent / f"{record['when'][:10]}.md"
    report.write_text("\n".join(_lines(record)) + "\n")
    return [path, *written, report]


def _plot(kinds: list[dict[str, Any]], path: Path) -> Path:
    families: dict[str, list[tuple[float, float]]] = {}
    for entry in kinds:
        if entry["ratio"] < 1:
            families.setdefault(entry["family"], []).append((entry["ratio"], entry["speed"]))
    figure, axes = plt.subplots(figsize=(7.5, 4.6), constrained_layout=True)
    ratios = [0.1 + step * 0.01 for step in range(41)]
    axes.plot(ratios, [3 / (2 + ratio) for ratio in ratios], color="0.6", linestyle=":", label="limit 3 / (2 + ρ)")
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.text(0.5, 1.005, "nn.Linear", color="0.3", ha="right", va="bottom", fontsize=9)
    for family, points in families.items():
        paper = family.startswith("the paper")
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if paper else {}
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=family, **style)
    axes.set(xlabel="share of rows kept, ρ", ylabel="speed of a training step, nn.Linear = 1", xticks=sorted(RATIOS))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _lines(record: dict[str, Any]) -> Iterator[str]:
    machine, versions = record["machine"], record["versions"]
    yield f"# Speed, {record['when'][:10]}\n"
    yield (
        f"{machine['cpu']}, {machine['threads']} threads, torch {versions['torch']}, "
        f"backsketch {versions['backsketch']} ({record['commit']})."
    )
    yield "Ratios to nn.Linear in one process, interleaved, best of several."
    yield f"Allocator: {record['settings']['allocator']}."
    for part, section in sections(record):
        yield f"\n## {section.title}\n\n{section.text}\n"
        if part == "kinds":
            yield "![speed](speed.png)\n"
        yield f"| {' | '.join(section.table.titles)} |".replace("|  |", "| |")
        yield "|---" * len(section.table.titles) + "|"
        for row in section.table.rows:
            yield f"| {' | '.join(row)} |"

"""Render the speed record: the plot of all kinds, and a dated report in Markdown. Reads only the record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from .contenders import RATIOS
from .frontier_figure import STYLE
from .speed_tables import sections

_QUIET, _GRID, _GUIDE = "#5b6570", "#e9ecef", "#8a949e"


def render(path: Path) -> list[Path]:
    """Write the plot and the report beside the record and return their paths."""
    record = json.loads(path.read_text())
    written = []
    if "kinds" in record["results"]:
        written.append(_plot(record, path.with_suffix(".png")))
    report = path.parent / f"{record['when'][:10]}.md"
    report.write_text("\n".join(_lines(record)) + "\n")
    return [path, *written, report]


def _plot(record: Mapping[str, Any], path: Path) -> Path:
    families: dict[str, list[tuple[float, float]]] = {}
    for entry in record["results"]["kinds"]:
        if entry["ratio"] < 1:
            families.setdefault(entry["family"], []).append((entry["ratio"], entry["speed"]))
    with rc_context(STYLE):
        _draw(families, record["settings"]["layer rows"]).savefig(path, dpi=150)
    return path


def _draw(families: Mapping[str, list[tuple[float, float]]], rows: int) -> Figure:
    figure = Figure(figsize=(9.2, 5.4), facecolor="white")
    axes = figure.add_axes((0.08, 0.11, 0.62, 0.7))
    ratios = [0.1 + step * 0.01 for step in range(41)]
    axes.plot(ratios, [3 / (2 + ratio) for ratio in ratios], color=_GUIDE, linestyle=":", label="limit 3 / (2 + ρ)")
    axes.axhline(1, color=_GUIDE, linewidth=1, linestyle=(0, (5, 4)))
    axes.text(0.5, 1.005, "nn.Linear", color=_QUIET, ha="right", va="bottom", fontsize=10)
    for family, points in families.items():
        paper = family.startswith("the paper")
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if paper else {}
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=5, label=family, **style)
    axes.set_xticks(sorted(RATIOS))
    axes.set_xlabel("share of rows kept, ρ", color=_QUIET, fontsize=10)
    axes.set_ylabel("speed of a training step, nn.Linear = 1", color=_QUIET, fontsize=10)
    axes.grid(color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, length=0, pad=6, labelsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(fontsize=10, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5), labelcolor=_QUIET)
    figure.text(0.02, 0.925, _message(families), fontsize=16, weight="bold")
    figure.text(0.02, 0.865, f"Forward and backward of one layer in fp32, {rows} rows.", fontsize=10, color=_QUIET)
    return figure


def _message(families: Mapping[str, list[tuple[float, float]]]) -> str:
    """Say the one thing to remember: what the fewest rows gain."""
    ratio, speed = min(families["rows"])
    return f"From {ratio:.0%} of its rows, a layer trains {speed:.2f} times as fast"


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

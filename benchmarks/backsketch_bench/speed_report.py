"""Render the speed record: the plot of relative throughput, and a dated report in Markdown. Reads only the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MIB = 2**20
RATIOS = (0.5, 0.2, 0.1)


def render(path: Path) -> list[Path]:
    """Write the plot and the report beside the record and return their paths."""
    record = json.loads(path.read_text())
    written = []
    if "layers" in record["results"]:
        written.append(_plot(record["results"]["layers"], path.with_suffix(".png")))
    report = path.parent / f"{record['when'][:10]}.md"
    report.write_text("\n".join(_lines(record)) + "\n")
    return [path, *written, report]


def _plot(layers: list[dict[str, Any]], path: Path) -> Path:
    families: dict[str, list[tuple[float, float]]] = {}
    for entry in layers:
        if entry["ratio"] < 1:
            families.setdefault(entry["family"], []).append((entry["ratio"], entry["speed"]))
    figure, axes = plt.subplots(figsize=(7.5, 4.6), constrained_layout=True)
    ratios = [0.1 + step * 0.01 for step in range(41)]
    axes.plot(ratios, [3 / (2 + ratio) for ratio in ratios], color="0.6", linestyle=":", label="limit 3 / (2 + ρ)")
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.text(0.5, 1.005, "nn.Linear", color="0.3", ha="right", va="bottom", fontsize=9)
    for family, points in families.items():
        paper = family.startswith("the paper")
        style = {"color": "black", "linestyle": "--"} if paper else {}
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=family, **style)
    axes.set(xlabel="share of rows kept, ρ", ylabel="speed of a training step, nn.Linear = 1", xticks=sorted(RATIOS))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _lines(record: dict[str, Any]) -> list[str]:
    results, machine, versions = record["results"], record["machine"], record["versions"]
    lines = [
        f"# Speed, {record['when'][:10]}",
        "",
        f"{machine['cpu']}, {machine['threads']} threads, torch {versions['torch']}, "
        f"backsketch {versions['backsketch']} ({record['commit']}), fp32.",
        "Ratios to nn.Linear in one process, interleaved, best of several.",
        "",
    ]
    if "layers" in results:
        lines += ["## One layer", "", "B = 4096, mean of 768 → 3072 and 3072 → 768.", "", "![speed](speed.png)", ""]
        lines += ["| | ρ = 0.5 | 0.2 | 0.1 | all rows |", "|---|---|---|---|---|", *_layer_rows(results["layers"]), ""]
    if "encoder" in results:
        lines += ["## Whole encoder", "", "RoBERTa-base's shapes, 12 blocks, batch 32 × 128, forward and backward.", ""]
        lines += ["| | speed | kept for backward | peak |", "|---|---|---|---|"]
        lines += [
            f"| {row['name']} | {row['speed']:.2f} | {row['kept'] / MIB:.0f} MiB | {row['peak'] / MIB:.0f} MiB |"
            for row in results["encoder"]
        ]
        lines.append("")
    if "transient" in results:
        rows = results["transient"][0]["rows"]
        lines += [
            "## Transient memory",
            "",
            f"B = {rows}, 768 → 768: the peak of a step beyond nn.Linear's, where the ",
        ]
        lines[-1] += "input is held by someone else anyway, beside the bytes kept."
        lines += ["", "| | peak beyond nn.Linear | kept |", "|---|---|---|"]
        lines += [
            f"| {row['name']} | {row['beyond_linear'] / MIB:.1f} MiB | {row['kept'] / MIB:.1f} MiB |"
            for row in results["transient"]
        ]
        lines.append("")
    if "growth" in results:
        lines += ["## Growth with the rows", "", "Time of the sketch itself, 256 features, ρ = 0.1.", ""]
        first, last = results["growth"][0]["rows"][0], results["growth"][0]["rows"][-1]
        lines += [f"| | at {first} rows | at {last} rows | log-log slope, last four sizes |", "|---|---|---|---|"]
        lines += [
            f"| {row['name']} | {row['seconds'][0] * 1e3:.2f} ms | {row['seconds'][-1] * 1e3:.1f} ms "
            f"| {row['slope']:.2f} |"
            for row in results["growth"]
        ]
        lines.append("")
    if "overhead" in results:
        lines += [
            "## Tiny layers",
            "",
            "64 rows, 64 → 64: the cost of a call.",
            "",
            "| | forward | forward + backward |",
        ]
        lines += ["|---|---|---|"]
        lines += [
            f"| {row['name']} | {row['forward_us']:.0f} µs | {row['step_us']:.0f} µs |" for row in results["overhead"]
        ]
        lines.append("")
    return lines


def _layer_rows(layers: list[dict[str, Any]]) -> list[str]:
    families: dict[str, dict[float, float]] = {}
    for entry in layers:
        families.setdefault(entry["family"], {})[entry["ratio"]] = entry["speed"]
    cells = {family: [own.get(ratio) for ratio in (*RATIOS, 1)] for family, own in families.items()}
    return [
        f"| {family} | " + " | ".join("" if value is None else f"{value:.2f}" for value in values) + " |"
        for family, values in cells.items()
    ]

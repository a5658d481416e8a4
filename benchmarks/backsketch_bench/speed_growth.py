"""Measure how the time of a sketch grows with the rows."""

from __future__ import annotations

from typing import Any

import torch

from backsketch import SketchConfig

from .speed_steps import sketch_step, slope
from .timing import best_times

SKETCHED = ("gaussian", "rademacher", "hadamard", "cosine", "fourier")


def growth(quick: bool) -> list[dict[str, Any]]:
    """Time the sketch itself (compress X, compress Y, multiply) as the rows grow, and fit the slope in log-log."""
    sizes = [1024 * 2**power for power in range(4 if quick else 7)]
    configs = {
        "rows": SketchConfig(ratio=0.1),
        "hash": SketchConfig(kind="hash", ratio=0.1),
        **{f"{kind}, block 128": SketchConfig(kind=kind, ratio=0.1, block=128) for kind in SKETCHED},
    }
    full = {"gaussian, full size": SketchConfig(kind="gaussian", ratio=0.1)}
    times: dict[str, list[float]] = {name: [] for name in (*configs, *full)}
    for rows in sizes:
        x, y = torch.randn(rows, 256), torch.randn(rows, 256)
        for group, rounds in ((configs, 12), (full, 2)):  # the full size takes seconds
            steps = {name: sketch_step(config, x, y) for name, config in group.items()}
            for name, seconds in best_times(steps, rounds=rounds, title=f"{rows} rows").items():
                times[name].append(seconds)
    found: list[dict[str, Any]] = []
    for name, own in times.items():
        slopes = {"slope": slope(sizes, own), "last_slope": slope(sizes[-4:], own[-4:])}
        found.append({"name": name, "rows": sizes, "seconds": own, **slopes})
    return found

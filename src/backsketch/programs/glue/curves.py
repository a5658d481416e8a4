"""Learning curves and noise, from what a Trainer logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..result_files import finite
from .tasks import Task

NOISE, KEPT, FACTOR = "backsketch/noise", "backsketch/kept_bytes", "backsketch/rate_factor"


def curves(log: Sequence[dict[str, Any]], task: Task) -> dict[str, list[dict[str, Any]]]:
    """Return the points of training (step, epoch, loss, learning rate) and of evaluation (loss, the task's metrics)."""
    names = {"loss": "loss", "learning_rate": "learning_rate"}
    evaluated = {f"eval_{name}": name for name in ("loss", *task.all_metrics, "score")}
    return {
        "train": [_point(entry, names) for entry in log if "loss" in entry],
        "eval": [_point(entry, evaluated) for entry in log if "eval_score" in entry],
    }


def noise(log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return D²_sketch / D²_SGD over the steps, and for each layer its mean over the steps that measured it."""
    points = [_point(entry, {NOISE: "ratio", FACTOR: "rate_factor"}) for entry in log if NOISE in entry]
    layers: dict[str, list[float]] = {}
    for entry in log:
        for name, value in entry.items():
            if name.startswith(f"{NOISE}/") and math.isfinite(value):
                layers.setdefault(name.removeprefix(f"{NOISE}/"), []).append(value)
    return {"curve": points, "layers": {name: sum(values) / len(values) for name, values in layers.items()}}


def most_kept(log: Sequence[dict[str, Any]]) -> int | None:
    """Return the most that a measured step kept for backward."""
    return max((int(entry[KEPT]) for entry in log if KEPT in entry), default=None)


def _point(entry: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    chosen = {short: entry[name] for name, short in names.items() if name in entry}
    return {"step": entry["step"], "epoch": entry["epoch"], **finite(chosen)}

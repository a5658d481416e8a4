"""What runs reached: scores, and how far training came beside exact training, each for all seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

from scipy.stats import t as student

from .artefact import MISSING, Record, select


def scores(records: list[Record], way: str, task: str) -> list[float]:
    """Return the scores of all seeds, times 100."""
    return [score(record) for record in select(records, "glue", way=way, task=task)]


def score(record: Record) -> float:
    """Return the score times 100."""
    return 100 * number(record["results"]["score"])


def number(value: float | None) -> float:
    """Return the value of a record, in which null stands for what is not finite."""
    return math.nan if value is None else value


def by_seed(records: list[Record], way: str, tasks: list[str], grid: str = "glue") -> dict[int, float]:
    """Return the mean over all tasks for each seed that has them all."""
    found: dict[int, list[float]] = {}
    for record in select(records, grid, way=way):
        found.setdefault(_seed(record), []).append(score(record))
    return {seed: mean(each) for seed, each in sorted(found.items()) if len(each) == len(tasks)}


def late_loss(record: Record) -> float:
    """Return the mean training loss over the second half of training."""
    losses = [point["loss"] for point in record["results"]["curves"]["train"]]
    return mean(map(number, losses[len(losses) // 2 :]))


def excess_loss(records: list[Record], way: str, task: str) -> list[float]:
    """Return the late loss relative to exact training's with the same seed, minus one, for each seed that has both."""
    exact = {_seed(record): late_loss(record) for record in select(records, "glue", way="exact", task=task)}
    runs = {_seed(record): late_loss(record) for record in select(records, "glue", way=way, task=task)}
    return [runs[seed] / exact[seed] - 1 for seed in sorted(runs.keys() & exact.keys())]


def gaps(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Return the differences by seed, over the seeds that both have."""
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return where the mean lies with 95% confidence, by Student's t: at least two values."""
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def cell(values: Sequence[float], form: str = ".1f") -> str:
    """Return a mean over seeds, its standard deviation, and how many they are, for a table."""
    if not values:
        return MISSING
    if not all(map(math.isfinite, values)):
        return f"diverged <sub>{len(values)}</sub>"
    spread = f" ± {stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{spread} <sub>{len(values)}</sub>"


def _seed(record: Record) -> int:
    seed: int = record["cell"].get("seed", 0)
    return seed

"""What runs of the GLUE grid reached: scores, and how far training came beside exact training."""

from __future__ import annotations

from statistics import mean

from .artefact import Record, select


def scores(records: list[Record], way: str, task: str) -> list[float]:
    """Return the scores of all seeds, times 100."""
    return [100 * record["results"]["score"] for record in select(records, "glue", way=way, task=task)]


def by_seed(records: list[Record], way: str, tasks: list[str], grid: str = "glue") -> dict[int, float]:
    """Return the mean over all tasks for each seed that has them all."""
    found: dict[int, list[float]] = {}
    for record in select(records, grid, way=way):
        found.setdefault(_seed(record), []).append(100 * record["results"]["score"])
    return {seed: mean(each) for seed, each in sorted(found.items()) if len(each) == len(tasks)}


def late_loss(record: Record) -> float:
    """Return the mean training loss over the second half of training."""
    losses = [point["loss"] for point in record["results"]["curves"]["train"]]
    return mean(losses[len(losses) // 2 :])


def excess_loss(records: list[Record], way: str, task: str) -> float | None:
    """Return the late loss relative to exact training's with the same seed, minus one: a mean over seeds, if any."""
    exact = {_seed(record): late_loss(record) for record in select(records, "glue", way="exact", task=task)}
    runs = {_seed(record): late_loss(record) for record in select(records, "glue", way=way, task=task)}
    both = runs.keys() & exact.keys()
    return mean(runs[seed] / exact[seed] - 1 for seed in both) if both else None


def _seed(record: Record) -> int:
    seed: int = record["cell"].get("seed", 0)
    return seed

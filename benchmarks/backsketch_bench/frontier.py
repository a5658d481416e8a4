"""The frontier: what every setting keeps, the noise it adds, and the time it takes, on real activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backsketch.programs.result_files import write_record
from backsketch.table import Table

from .activations import Activation, Subject, collect, token_layers, train
from .frontier_choices import BUDGETS, Choice, grid, within
from .frontier_points import Point, main_layer, measure, step_times

ROUNDS = 9


def run(subject: Subject, path: Path, *, quick: bool = False) -> list[Point]:
    """Train the subject, measure every setting on it, write the record and return the points.

    Args:
        quick: fewer settings, batches and rounds of timing.
    """
    rounds = 1 if quick else ROUNDS
    loss = train(subject)
    layers = token_layers(collect(subject, draws=1 if quick else 9))
    choices = [choice for choice in grid() if not quick or choice.config.ratio in (1.0, 0.1)]
    points, budgets = frontier(layers, choices, BUDGETS[2:3] if quick else BUDGETS, rounds=rounds)
    used = {**settings(subject, layers, loss=loss, rounds=rounds), "quick": quick}
    write_record(path, settings=used, results=results(points, budgets))
    return points


def frontier(
    layers: Sequence[Activation], choices: Sequence[Choice], budgets: Sequence[float], *, rounds: int
) -> tuple[list[Point], dict[float, list[Point]]]:
    """Return the points of the choices with their times, and those of ``rows`` at each budget of bytes."""
    points = measure(layers, choices)
    spent = {budget: measure(layers, within(budget)) for budget in budgets}
    times = step_times(layers, choices, rounds=rounds)
    return [_timed(point, times[str(point.choice)]) for point in points], spent


def table(points: Sequence[Point]) -> Table:
    """Return the points as a table, one row each."""
    titles = ("setting", "bytes", "noise", "least", "most", "time")
    rows = (
        (
            point.choice.short,
            f"{point.bytes:.1%}",
            *(f"{number:.3g}" for number in (point.noise, point.least, point.most)),
            "" if point.time is None else f"{point.time:.2f}",
        )
        for point in points
    )
    notes = (
        "bytes: kept, as a share of the linear layers' fp32 inputs",
        "noise: added to the weight gradient, relative to the batch's own; mean, least, most",
        "time: of a step of the largest layer, relative to nn.Linear",
    )
    return Table(titles, tuple(rows), notes, numeric=frozenset(range(1, len(titles))))


def results(points: Sequence[Point], budgets: Mapping[float, Sequence[Point]]) -> dict[str, Any]:
    """Return the points for a JSON record."""
    spent = {str(budget): [point.as_record() for point in own] for budget, own in budgets.items()}
    return {"points": [point.as_record() for point in points], "budgets": spent}


def settings(subject: Subject, layers: Sequence[Activation], *, loss: float, rounds: int) -> dict[str, Any]:
    """Return what a record says of how its points were measured."""
    main = main_layer(layers)
    padding = 1 - sum(float(layer.valid.double().mean()) for layer in layers if layer.valid is not None) / len(layers)
    return {
        **subject.settings,
        "last_loss": round(loss, 4),
        "layers": len(layers),
        "padding": round(padding, 4),
        "timed_layer": main.name,
        "timed_shape": [main.x.shape[:-1].numel(), main.x.shape[-1], main.y.shape[-1]],
        "rounds": rounds,
    }


def _timed(point: Point, time: float) -> Point:
    return Point(point.choice, point.bytes, point.noise, point.least, point.most, time)

"""The frontier: what every setting keeps, the noise it adds, and the time it takes, on real activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from backsketch.programs.result_files import write_record
from backsketch.table import Table

from .activations import Activation, Subject, collect, token_layers, train
from .frontier_choices import BUDGETS, Choice, grid, within
from .frontier_points import Point, best_curve, is_padded, main_layer, points_of, step_times
from .layer_noise import LayerNoise
from .layer_records import layer_records
from .progress import track

ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Frontier:
    """What was measured: the points of the grid with their times, those of each budget, the best, and each layer."""

    points: Sequence[Point]
    budgets: Mapping[float, Sequence[Point]]
    best: Sequence[Point]
    layers: Mapping[str, Mapping[str, float]]

    def as_record(self) -> dict[str, Any]:
        """Return all of it for a JSON record."""
        spent = {str(budget): [point.as_record() for point in own] for budget, own in self.budgets.items()}
        points, best = ([point.as_record() for point in each] for each in (self.points, self.best))
        return {"points": points, "budgets": spent, "best": best, "layers": self.layers}


def run(subject: Subject, path: Path, *, dtype: torch.dtype = torch.float32, quick: bool = False) -> Frontier:
    """Train the subject, measure every setting on it, write the record and return what was measured.

    Args:
        dtype: of the model when it is measured; it is trained in its own.
        quick: fewer settings, batches and rounds of timing.
    """
    rounds = 1 if quick else ROUNDS
    loss = train(subject)
    layers = token_layers(collect(subject, 1 if quick else 9, dtype))
    choices = [choice for choice in grid(padded=is_padded(layers)) if not quick or choice.config.ratio in (1.0, 0.1)]
    found = frontier(layers, choices, BUDGETS[2:3] if quick else BUDGETS, rounds=rounds)
    used = {**settings(subject, layers, loss=loss, rounds=rounds), "quick": quick}
    write_record(path, settings=used, results=found.as_record(), packages=["transformers"])
    return found


def frontier(
    layers: Sequence[Activation], choices: Sequence[Choice], budgets: Sequence[float], *, rounds: int
) -> Frontier:
    """Measure the choices with their times, and ``rows`` at each budget of bytes."""
    noises = [LayerNoise.of(layer) for layer in track(layers, "layers", len(layers))]
    points = [point for each in track(choices, "noise", len(choices)) for point in points_of(layers, noises, [each])]
    itemsize, padded = layers[0].x.element_size(), is_padded(layers)
    spent = {budget: points_of(layers, noises, within(budget, itemsize, padded=padded)) for budget in budgets}
    times = step_times(layers, choices, rounds=rounds)
    timed = [replace(point, time=times[str(point.choice)]) for point in points]
    return Frontier(timed, spent, best_curve(layers, noises), layer_records(noises))


def table(found: Frontier, dtype: str) -> Table:
    """Return the points as a table, one row each."""
    titles = ("setting", "bytes", "noise", "least", "most", "time")
    rows = (
        (
            point.choice.short,
            f"{point.bytes:.1%}",
            *(f"{number:.3g}" for number in (point.noise, point.least, point.most)),
            "" if point.time is None else f"{point.time:.2f}",
        )
        for point in found.points
    )
    notes = (
        f"bytes: kept, as a share of the linear layers' {dtype} inputs",
        "noise: added to the weight gradient, relative to the batch's own; mean, least, most",
        "time: of a step of the largest layer, relative to nn.Linear",
    )
    return Table(titles, tuple(rows), notes, numeric=frozenset(range(1, len(titles))))


def settings(subject: Subject, layers: Sequence[Activation], *, loss: float, rounds: int) -> dict[str, Any]:
    """Return what a record says of how its points were measured."""
    main = main_layer(layers)
    padding = 1 - sum(float(layer.valid.double().mean()) for layer in layers if layer.valid is not None) / len(layers)
    return {
        **subject.settings,
        "dtype": str(main.x.dtype).removeprefix("torch."),
        "last_loss": round(loss, 4),
        "layers": len(layers),
        "padding": round(padding, 4),
        "timed_layer": main.name,
        "timed_shape": [main.x.shape[:-1].numel(), main.x.shape[-1], main.y.shape[-1]],
        "rounds": rounds,
    }

"""Growth: the peak of a step at any batch size or length, from the logs of a few.

A step has the same events at every size, and the bytes of each event are a polynomial of the size: of degree 1 in the
batch, of degree 2 in the length. Numbers of rows are rounded, so a prediction may be off by a few rows. Where the
events differ, as those of a loss that takes some rows at a time, the peaks themselves take the place of events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from .rank_share import RankShare
from .timeline import Timeline, with_changes


class Growth:
    """A polynomial for the bytes of each event, through the steps at some sizes, which run when first asked for."""

    def __init__(self, sizes: Sequence[int], step: Callable[[int], Timeline]) -> None:
        self.sizes = tuple(sizes)
        self._step = step
        self._totals: dict[RankShare, list[int]] = {}

    @cached_property
    def foreseeable(self) -> bool:
        """Tell whether the steps have the same events."""
        first, *others = self._steps
        return all(first.matches(other) for other in others)

    def peak(self, size: int, share: RankShare) -> float:
        """Predict the bytes of the peak at a size."""
        weights = _lagrange(self.sizes, size)
        if not self.foreseeable:
            if share not in self._totals:
                self._totals[share] = [step.peak(share).total for step in self._steps]
            totals = self._totals[share]
            return sum(weight * total for weight, total in zip(weights, totals, strict=True))
        segments = zip(*(step.segments for step in self._steps), strict=True)
        known: dict[int, Tensor] = {}
        changes = []
        for same in segments:
            if id(same[0]) not in known:
                together = (weight * each.changes for weight, each in zip(weights, same, strict=True))
                known[id(same[0])] = torch.stack(list(together)).sum(0)
            changes.append(known[id(same[0])])
        return with_changes(self._steps[0], changes).peak(share).total

    @cached_property
    def _steps(self) -> list[Timeline]:
        return [self._step(size) for size in self.sizes]


def largest(
    peak: Callable[[int], int],
    limit: int,
    *,
    sizes: Sequence[int],
    most: int,
    predict: Callable[[int], float] | None,
    trusted: Callable[[], bool],
) -> int:
    """Return the largest size, at most ``most``, whose step has a peak of at most ``limit`` bytes; 0 if none has.

    Args:
        peak: measures the peak of the step of a size, which grows with the size.
        limit: the bytes that there are.
        sizes: to begin with, until a prediction is needed; those that ``predict`` knows.
        most: the largest size to think of.
        predict: foretells what ``peak`` would measure, or None. What it says is measured before it is believed.
        trusted: tells whether to believe, once a size fits, that the next one does not if that is foretold.
    """
    measured: dict[int, int] = {}
    fitting, too_large = 0, most + 1
    waiting = [size for size in sizes if size <= most]
    while fitting + 1 < too_large:
        if waiting:
            guess = waiting.pop(0)
            if not fitting < guess < too_large:
                continue
        elif predict is not None and len(measured) < _TRIES:
            guess = _foretold(predict, measured, limit, fitting, too_large)
            if guess == fitting and fitting in measured and trusted():  # the next size is foretold not to fit
                return fitting
        else:
            guess = 2 * fitting if too_large > most else (fitting + too_large) // 2
        guess = min(max(guess, fitting + 1), too_large - 1)
        measured[guess] = peak(guess)
        fitting, too_large = (guess, too_large) if measured[guess] <= limit else (fitting, guess)
    return fitting


_TRIES = 10  # so often a size is measured before sizes are halved instead


def _foretold(
    predict: Callable[[int], float], measured: Mapping[int, int], limit: int, fitting: int, too_large: int
) -> int:
    """Return the largest size that is foretold to fit, given how far the prediction was off at the nearest sizes."""
    off = {size: measured[size] - predict(size) for size in (fitting, too_large) if size in measured}

    def corrected(size: int) -> float:
        if len(off) == 2:
            weight = (size - fitting) / (too_large - fitting)
            return predict(size) + (1 - weight) * off[fitting] + weight * off[too_large]
        return predict(size) + next(iter(off.values()), 0.0)

    return _last(lambda size: corrected(size) <= limit, fitting, too_large)


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number below ``high`` for which something holds, if it holds up to there; else ``low``."""
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _lagrange(points: Sequence[int], at: int) -> list[float]:
    """Return the weights with which values at ``points`` give the value at another point, for a polynomial."""
    weights = []
    for one in points:
        weight = 1.0
        for other in points:
            if other != one:
                weight *= (at - other) / (one - other)
        weights.append(weight)
    return weights

"""Growth: the peak of a step at any batch size or length, from the logs of a few.

A step has the same events at every size, and the bytes of each event are a polynomial of the size: of degree 1 in the
batch, of degree 2 in the length. Numbers of rows are rounded, so a prediction may be off by a few rows. Where the
events differ, as those of a loss that takes some rows at a time, the peaks themselves take the place of events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .rank_share import RankShare
from .timeline import Timeline, with_changes


class Growth:
    """The steps at some sizes, and through them a polynomial for the bytes of each event."""

    def __init__(self, steps: Mapping[int, Timeline]) -> None:
        self._steps = dict(steps)
        self._totals: dict[RankShare, list[int]] = {}
        first, *others = self._steps.values()
        self.foreseeable = all(first.matches(other) for other in others)

    def peak(self, size: int, share: RankShare) -> float:
        """Predict the bytes of the peak at a size."""
        first = next(iter(self._steps.values()))
        weights = _lagrange(list(self._steps), size)
        if not self.foreseeable:
            if share not in self._totals:
                self._totals[share] = [step.peak(share).total for step in self._steps.values()]
            totals = self._totals[share]
            return sum(weight * total for weight, total in zip(weights, totals, strict=True))
        segments = zip(*(step.segments for step in self._steps.values()), strict=True)
        known: dict[int, Tensor] = {}
        changes = []
        for same in segments:
            if id(same[0]) not in known:
                together = (weight * each.changes for weight, each in zip(weights, same, strict=True))
                known[id(same[0])] = torch.stack(list(together)).sum(0)
            changes.append(known[id(same[0])])
        return with_changes(first, changes).peak(share).total


def largest(
    fits: Callable[[int], int],
    limit: int,
    *,
    start: int,
    most: int,
    predict: Callable[[int], float] | None,
    exact: bool = True,
) -> int:
    """Return the largest size, at most ``most``, whose step has a peak of at most ``limit`` bytes; 0 if none has.

    Args:
        fits: measures the peak of the step of a size, which grows with the size.
        limit: the bytes that there are.
        start: a size to begin with.
        most: the largest size to think of.
        predict: foretells what ``fits`` would measure, or None. What it says is measured before it is believed.
        exact: whether to believe, once a size fits, that the next one does not if that is foretold.
    """
    measured: dict[int, int] = {}
    fitting, too_large, guess = 0, most + 1, min(start, most)
    while fitting + 1 < too_large:
        if predict is not None and len(measured) < _TRIES:
            guess = _foretold(predict, measured, limit, fitting, too_large)
            if exact and guess == fitting and fitting in measured:  # the next size is foretold not to fit
                return fitting
        elif measured:
            guess = 2 * fitting if too_large > most else (fitting + too_large) // 2
        guess = min(max(guess, fitting + 1), too_large - 1)
        measured[guess] = fits(guess)
        fitting, too_large = (guess, too_large) if measured[guess] <= limit else (fitting, guess)
    return fitting


_TRIES = 8  # so often a prediction is asked before sizes are halved instead


def _foretold(
    predict: Callable[[int], float], measured: Mapping[int, int], limit: int, fitting: int, too_large: int
) -> int:
    """Return the largest size that is foretold to fit, given how far the prediction was off at the nearest size."""
    nearest = fitting or min(measured, default=0)
    off = measured[nearest] - predict(nearest) if nearest else 0.0
    return _last(lambda size: predict(size) + off <= limit, fitting, too_large)


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number below ``high`` for which something holds, if it holds up to there; else ``low``."""
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _lagrange(points: list[int], at: int) -> list[float]:
    """Return the weights with which values at ``points`` give the value at another point, for a polynomial."""
    weights = []
    for one in points:
        weight = 1.0
        for other in points:
            if other != one:
                weight *= (at - other) / (one - other)
        weights.append(weight)
    return weights

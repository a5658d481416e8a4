"""Growth: the peak of a step at any batch size or length, from the logs of a few.

A step has the same events at every size, and the bytes of each event are a polynomial of the size: of degree 1 in the
batch, of degree 2 in the length. Numbers of rows are rounded, so a prediction may be off by a few rows. Where the
events differ, as those of a loss that takes some rows at a time, and of a single example, the peaks themselves take
the place of events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .rank_share import RankShare
from .timeline import Timeline, with_changes


class Growth:
    """The peak of a step at any size: a polynomial for the bytes of each event, through as many steps as it needs.

    Args:
        sizes: whose steps these are, if they have the same events; else the first others that do.
        step: runs the step of a size.
        share: what a rank holds of the model.
    """

    def __init__(self, sizes: Sequence[int], step: Callable[[int], Timeline], share: RankShare) -> None:
        self._sizes, self._step, self._share = tuple(sizes), step, share
        self._steps: dict[int, Timeline] = {}
        self._totals: dict[int, int] = {}
        self._same: tuple[int, ...] | None = None  # sizes with the same events, () for too few; None when not known

    def measured(self, size: int) -> int:
        """Return the bytes of the peak at a size, whose step runs."""
        if size not in self._totals:
            self._same = None
            self._totals[size] = self._at(size).peak(self._share).total
        return self._totals[size]

    @property
    def foreseeable(self) -> bool:
        """Tell whether steps have the same events."""
        return bool(self._alike())

    def peak(self, size: int) -> float:
        """Predict the bytes of the peak at a size."""
        if not (alike := self._alike()):
            return sum(
                weight * self.measured(each)
                for weight, each in zip(_lagrange(self._sizes, size), self._sizes, strict=True)
            )
        weights, steps = _lagrange(alike, size), [self._steps[each] for each in alike]
        known: dict[int, Tensor] = {}
        changes = []
        for same in zip(*(step.segments for step in steps), strict=True):
            if id(same[0]) not in known:
                together = (weight * each.changes for weight, each in zip(weights, same, strict=True))
                known[id(same[0])] = torch.stack(list(together)).sum(0)
            changes.append(known[id(same[0])])
        return with_changes(steps[0], changes).peak(self._share).total

    def _alike(self) -> tuple[int, ...]:
        if self._same is None:
            for size in self._sizes:
                self._at(size)
            groups = (
                [other for other, step in self._steps.items() if one.matches(step)] for one in self._steps.values()
            )
            count = len(self._sizes)
            self._same = next((tuple(group[:count]) for group in groups if len(group) >= count), ())
        return self._same

    def _at(self, size: int) -> Timeline:
        if size not in self._steps:
            self._steps[size] = self._step(size)
        return self._steps[size]


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
        predict: says what ``peak`` would measure, or None. That is measured before it is believed.
        trusted: tells whether to believe, once a size fits, that the next one does not if that is predicted.
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
            guess = _predicted(predict, measured, limit, fitting, too_large)
            if guess == fitting and fitting in measured and trusted():  # the next size is predicted not to fit
                return fitting
        else:
            guess = 2 * fitting if too_large > most else (fitting + too_large) // 2
        guess = min(max(guess, fitting + 1), too_large - 1)
        measured[guess] = peak(guess)
        fitting, too_large = (guess, too_large) if measured[guess] <= limit else (fitting, guess)
    return fitting


_TRIES = 10  # so often a size is measured before sizes are halved instead


def _predicted(
    predict: Callable[[int], float], measured: Mapping[int, int], limit: int, fitting: int, too_large: int
) -> int:
    """Return the largest size that is predicted to fit, given how far the prediction was off at the nearest sizes."""
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

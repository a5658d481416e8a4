"""ValidShares: how the share of rows that count is distributed over batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_BINS = 64
_REMEMBERED = 1024  # calls
_DEVIATIONS = 2.5  # standard deviations by which a batch with little padding is above the mean


def _zeros() -> list[float]:
    return [0.0] * _BINS


@dataclass(slots=True)
class ValidShares:
    """A histogram of shares in [0, 1], each bin with its own mean. It has the same size whatever was counted.

    B/k is not linear in the share of rows that count: where a sketch has room for all of them it adds nothing. So the
    mean share would promise too little noise.

    Attributes:
        counts: calls in each bin; totals: the sums of their shares.
    """

    counts: list[float] = field(default_factory=_zeros)
    totals: list[float] = field(default_factory=_zeros)

    def add(self, share: float) -> None:
        """Count a call. The counts are halved now and then, so that what is no longer seen is forgotten."""
        if sum(self.counts) >= _REMEMBERED:
            halves = [count / 2 if count >= 1 else 0.0 for count in self.counts]
            self.totals = [
                total * half / count if count else 0.0
                for total, half, count in zip(self.totals, halves, self.counts, strict=True)
            ]
            self.counts = halves
        bin_index = min(int(share * _BINS), _BINS - 1)
        self.counts[bin_index] += 1
        self.totals[bin_index] += share

    @property
    def known(self) -> list[tuple[float, float]]:
        """Return the mean share of each bin that has calls, and how many, by rising share."""
        pairs = zip(self.counts, self.totals, strict=True)
        return [(total / count, count) for count, total in pairs if count]

    @property
    def high(self) -> float:
        """Return the share in a batch with little padding, 2.5 standard deviations above the mean.

        The largest share so far would depend on how many batches were seen.
        """
        known = self.known
        if not known:
            return 1.0
        calls = sum(count for _, count in known)
        mean = sum(share * count for share, count in known) / calls
        variance = sum((share - mean) ** 2 * count for share, count in known) / calls
        return min(1.0, mean + _DEVIATIONS * math.sqrt(variance))

    def as_list(self) -> list[float]:
        """Return the numbers for a ``state_dict``; those of several processes can be added."""
        return [*self.counts, *self.totals]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> ValidShares:
        """Return what ``as_list`` has saved."""
        return cls(list(numbers[:_BINS]), list(numbers[_BINS:]))

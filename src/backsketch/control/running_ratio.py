"""RunningRatio: added noise / SGD's noise, from averages over the last measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class RunningRatio:
    """Exponential averages of D²_sketch and of D²_SGD, and their ratio.

    Both are averaged apart: single estimates are unbiased and may be negative, their ratio is neither. Both averages
    start at zero and have the same weights, so the ratio has no bias of the start.
    """

    added: float = 0.0
    sgd: float = 0.0
    measured: int = 0

    def update(self, added: float, sgd: float, window: int) -> None:
        """Count one measured step. What is not finite is left out."""
        if not (math.isfinite(added) and math.isfinite(sgd)):
            return
        share = 1 / window
        self.added += share * (added - self.added)
        self.sgd += share * (sgd - self.sgd)
        self.measured += 1

    @property
    def value(self) -> float | None:
        """Return the ratio; None while nothing was measured or an average makes no sense as a variance."""
        if not self.measured or self.sgd <= 0 or self.added < 0:
            return None
        ratio = self.added / self.sgd
        return ratio if math.isfinite(ratio) else None

    def as_list(self) -> list[float]:
        """Return the numbers for a ``state_dict``."""
        return [self.added, self.sgd, self.measured]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> RunningRatio:
        """Return what ``as_list`` has saved."""
        added, sgd, measured = numbers
        return cls(float(added), float(sgd), int(measured))

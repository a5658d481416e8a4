"""LayerAverages: the noise of a layer whatever it keeps, from averages over measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields

from ..config import SketchConfig
from ..monitor.noise_records import Record

_REMEMBERED = 64  # measured steps whose padding is known


@dataclass(slots=True)
class LayerAverages:
    """Exponential averages of what does not depend on the layer's config, a measured step at a time.

    Uniform rows in b bits add (B/k − 1) D²_SGD + B/k · U / (2^b − 1)², with U the same for all b, since the
    step between levels is the range of a group over 2^b − 1. B does not count padded rows.

    Attributes:
        sgd: D²_SGD; unit: U; other: what is added by calls whose input is kept in another way than the config says.
        rows, calls: of a step; sketched: how many of the calls ran as the config says.
        shares: of rows that count, in the last measured steps. B/k is not linear in it: where a sketch has room for
            all rows that count it adds nothing, so the mean share would promise too little noise.
    """

    sgd: float = 0.0
    unit: float = 0.0
    other: float = 0.0
    rows: float = 0.0
    calls: float = 0.0
    sketched: float = 0.0
    measured: float = 0.0
    shares: list[float] = field(default_factory=list)

    def update(self, record: Record, config: SketchConfig, window: int) -> None:
        """Count one measured step, which ran under ``config``. What is not finite is left out."""
        added, sgd, rounding = (
            float(record[name]) for name in ("sketch_variance", "sgd_variance", "rounding_variance")
        )
        if not all(map(math.isfinite, (added, sgd, rounding))):
            return
        rows, valid, dim = int(record["rows"]), int(record["valid_rows"]), int(record["dim"])
        as_configured = int(record["sketched_calls"]) > 0
        unit = rounding / growth(valid, dim) * levels(config) ** 2 if as_configured else 0.0
        now = (
            sgd, unit, 0.0 if as_configured else added,
            rows, int(record["calls"]), int(record["sketched_calls"]),
        )  # fmt: skip
        self.shares = [*self.shares, valid / max(rows, 1)][-_REMEMBERED:]
        self.measured += 1
        share = 1 / min(self.measured, window)
        for each, value in zip(fields(self), now, strict=False):
            old = getattr(self, each.name)
            setattr(self, each.name, old + share * (value - old))

    def added(self, config: SketchConfig) -> float:
        """Return D² under ``config``."""
        if not self.sketched:
            return max(self.other, 0.0)
        rows, dim = self.call_rows, config.dim_for(self.call_rows)
        grown = sum(growth(share * rows, dim) for share in self.shares) / len(self.shares)
        return (grown - 1) * max(self.sgd, 0.0) + grown * max(self.unit, 0.0) / levels(config) ** 2

    @property
    def call_rows(self) -> int:
        """Return the rows of a call."""
        return max(1, round(self.rows / max(self.calls, 1)))

    def as_list(self) -> list[float]:
        """Return the numbers for a ``state_dict``."""
        *numbers, shares = astuple(self)
        return [*numbers, *shares]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> LayerAverages:
        """Return what ``as_list`` has saved."""
        count = len(fields(cls)) - 1
        averages = cls(shares=list(numbers[count:]))
        for each, number in zip(fields(cls), numbers[:count], strict=False):
            setattr(averages, each.name, number)
        return averages


def growth(valid: float, dim: float) -> float:
    """Return B/k; 1 where all rows that count are kept."""
    return max(1.0, valid / max(dim, 1))


def levels(config: SketchConfig) -> int:
    """Return the number of steps in the range of a group."""
    assert config.bits is not None
    return int(2**config.bits - 1)

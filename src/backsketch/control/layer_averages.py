"""LayerAverages: the noise of a layer whatever it keeps, from averages over measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from ..config import SketchConfig
from ..monitor.noise_records import Record
from .valid_shares import ValidShares


@dataclass(slots=True)
class LayerAverages:
    """Exponential averages of what does not depend on the layer's config, a measured step at a time.

    Uniform rows in b bits add (B/k − 1) D²_SGD + B/k · U / (2^b − 1)², with U the same for all b, since the
    step between levels is the range of a group over 2^b − 1. B does not count padded rows.

    Attributes:
        sgd: D²_SGD; unit: U; other: what is added by calls whose input is kept in another way than the config says.
        rows, calls: of a step; held: of how many calls the input is kept at one time; sketched: how many of the calls
            ran as the config says.
        measured: how many steps; shares: of rows that count, over calls.
    """

    sgd: float = 0.0
    unit: float = 0.0
    other: float = 0.0
    rows: float = 0.0
    calls: float = 0.0
    held: float = 0.0
    sketched: float = 0.0
    measured: float = 0.0
    shares: ValidShares = field(default_factory=ValidShares)

    def update(self, record: Record, config: SketchConfig, window: int, unit: float = 1.0) -> None:
        """Count one measured step, which ran under ``config``, but not its share of rows that count.

        Variances are divided by ``unit``. What is not finite is left out.
        """
        added, sgd, rounding = (
            float(record[name]) / unit for name in ("sketch_variance", "sgd_variance", "rounding_variance")
        )
        if not all(map(math.isfinite, (added, sgd, rounding))):
            return
        valid, dim = int(record["valid_rows"]), int(record["dim"])
        as_configured = int(record["sketched_calls"]) > 0
        now = (
            sgd,
            rounding / growth(valid, dim) * levels(config) ** 2 if as_configured else 0.0,
            0.0 if as_configured else added,
            *(int(record[name]) for name in ("rows", "calls", "held_calls", "sketched_calls")),
        )
        self.measured += 1
        share = 1 / min(self.measured, window)
        for each, value in zip(fields(self), now, strict=False):
            old = getattr(self, each.name)
            setattr(self, each.name, old + share * (value - old))

    def added(self, config: SketchConfig, little_padding: float = 0.0) -> float:
        """Return D² under ``config`` in a mean batch, plus ``little_padding`` times that in one with little padding."""
        return self.added_if(self.growths(config.dim_for(self.call_rows)), config, little_padding)

    def growths(self, dim: int) -> tuple[float, float]:
        """Return B/k for ``dim`` kept rows: the mean over batches, and that of a batch with little padding."""
        known = self.shares.known or [(1.0, 1.0)]
        mean = sum(growth(share * self.call_rows, dim) * count for share, count in known)
        return mean / sum(count for _, count in known), growth(self.shares.high * self.call_rows, dim)

    def added_if(self, growths: tuple[float, float], config: SketchConfig, little_padding: float) -> float:
        """Return what ``added`` does, with ``growths`` known."""
        batches = 1 + little_padding
        if not self.sketched:
            return batches * max(self.other, 0.0)
        grown = growths[0] + little_padding * growths[1]
        return (grown - batches) * max(self.sgd, 0.0) + grown * max(self.unit, 0.0) / levels(config) ** 2

    @property
    def call_rows(self) -> int:
        """Return the rows of a call."""
        return max(1, round(self.rows / max(self.calls, 1)))

    def as_list(self) -> list[float]:
        """Return the numbers for a ``state_dict``, as many whatever was measured."""
        return [*(getattr(self, each.name) for each in fields(self)[:-1]), *self.shares.as_list()]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> LayerAverages:
        """Return what ``as_list`` has saved."""
        names = [each.name for each in fields(cls)[:-1]]
        averages = cls(shares=ValidShares.of(numbers[len(names) :]))
        for name, number in zip(names, numbers, strict=False):
            setattr(averages, name, number)
        return averages

    @classmethod
    def over_processes(cls, sums: Sequence[float], measured: float) -> LayerAverages:
        """Return the average over processes of whose ``as_list`` these are the sums, ``measured`` of which know it.

        Noise is that of all of them; sizes are those of one.
        """
        total = cls.of(sums)
        for name in ("rows", "calls", "held"):
            setattr(total, name, getattr(total, name) / max(measured, 1.0))
        return total


def growth(valid: float, dim: float) -> float:
    """Return B/k; 1 where all rows that count are kept."""
    return max(1.0, valid / max(dim, 1))


def levels(config: SketchConfig) -> int:
    """Return the number of steps in the range of a group."""
    assert config.bits is not None
    return int(2**config.bits - 1)

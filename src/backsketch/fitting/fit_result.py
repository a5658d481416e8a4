"""Fit: what fit returns: a row for each way to train, whether it fits, and the best of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..table import readable
from .timeline import StepPeak
from .ways import AS_PRECISE, NO_NOISE

WISHES = ("time", "noise", "batch", "length")
FUSED, ADAPTERS = "fused loss", "LoRA"
Spelled: TypeAlias = Callable[[str, object], str]  # an option and its value, as a user writes them


def in_python(name: str, value: object) -> str:
    """Write an option as an argument of a function."""
    return f"{name}={value!r}"


@dataclass(frozen=True, kw_only=True)
class FitRow:
    """One way to train, on one rank.

    Attributes:
        group: what holds beside the way: the fused loss, adapters; "" for a model as it is.
        way: its name.
        code: lines of Python that switch it on.
        noise: how much noise it adds to weight gradients, in words.
        weights, gradients, states: bytes, sharded over the ranks.
        activations: bytes kept for backward when forward ends.
        peak: of the whole step, and what it is made of.
        largest_batch: at the given length; 0 if none fits.
        largest_length: with the given batch; 0 if none fits, None if examples have no length.
        seconds: of forward and backward, by the roofline of an accelerator.
        time: the same as a multiple of exact training.
        measured_seconds: of forward and backward on this machine, if asked for.
        checkpointed: how many blocks are, of how many.
    """

    group: str
    way: str
    code: tuple[str, ...]
    noise: str
    weights: int
    gradients: int
    states: int
    activations: int
    peak: StepPeak
    largest_batch: int
    largest_length: int | None
    seconds: float
    time: float
    measured_seconds: float | None = None
    checkpointed: tuple[int, int] = (0, 0)

    @property
    def title(self) -> str:
        """Return the way in words, with its group."""
        some, of = self.checkpointed
        blocks = f" of {some} of {of} blocks" if 0 < some < of else ""
        return f"{self.way}{blocks}, {self.group}" if self.group else f"{self.way}{blocks}"

    @property
    def fixed(self) -> int:
        """Return the bytes that no way to keep activations changes: weights, gradients and states."""
        return self.weights + self.gradients + self.states


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether training steps fit into ``memory`` bytes, way by way.

    Attributes:
        rows: the ways; the first is exact training.
        memory: bytes of a card.
        batch, length: of the step, on each rank; ``length`` is None if examples have none.
        positions: the longest length that the model has positions for, or None.
        optimizer, ranks, wish: as given.
    """

    rows: tuple[FitRow, ...]
    memory: int
    batch: int
    length: int | None
    positions: int | None
    optimizer: str
    ranks: int
    wish: str

    def fits(self, row: FitRow) -> bool:
        """Tell whether the step of a way fits."""
        return row.peak.total <= self.memory

    @property
    def best(self) -> FitRow | None:
        """Return the best way for the wish among those that fit, or None if none does."""
        fitting = [row for row in self.rows if self.fits(row)]
        return min(fitting, key=self._order, default=None)

    @property
    def smallest(self) -> FitRow:
        """Return the way with the lowest peak."""
        return min(self.rows, key=lambda row: row.peak.total)

    @property
    def timed(self) -> FitRow:
        """Return the way that all times are multiples of: the first that was measured, or else exact training."""
        return next((row for row in self.rows if row.measured_seconds is not None), self.rows[0])

    def relative_time(self, row: FitRow) -> float | None:
        """Return the time of a way as a multiple of that of ``timed``; None if only others were measured."""
        if self.timed.measured_seconds is None:
            return row.time
        return None if row.measured_seconds is None else row.measured_seconds / self.timed.measured_seconds

    @property
    def unit(self) -> tuple[str, int]:
        """Return the unit in which its sizes are easy to read, and its bytes."""
        return ("GiB", 2**30) if self.rows[0].peak.total >= 4 * 2**30 else ("MiB", 2**20)

    @property
    def headline(self) -> str:
        """Say whether exact training fits and by how much, and if not, what does."""
        exact = self.rows[0].peak.total
        size = f"{readable(exact)} of {readable(self.memory)}"
        if exact <= self.memory:
            return f"It fits: exact training takes {size}, and {readable(self.memory - exact)} are left."
        over = f"It does not fit as it is: exact training takes {size}, {readable(exact - self.memory)} too much."
        if (best := self.best) is not None:
            return f"{over} It fits with {best.title}, and {readable(self.memory - best.peak.total)} are left."
        least = self.smallest
        missing = readable(least.peak.total - self.memory)
        return f"{over} Nothing here fits: with {least.title} it is still {missing} too much."

    def __str__(self) -> str:
        from .fit_table import as_text  # which needs this class

        return as_text(self, columns=120)

    def print_table(self) -> None:
        """Print it, as wide as the terminal is."""
        from .fit_table import as_text

        print(as_text(self, columns=shutil.get_terminal_size().columns))

    def record(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        best = None if self.best is None else {"group": self.best.group, "way": self.best.way}
        about = {name: getattr(self, name) for name in _ABOUT}
        return about | {"headline": self.headline, "best": best, "rows": self.to_records()}

    def to_records(self) -> list[dict[str, Any]]:
        """Return the rows as plain values."""
        return [_record(row) | {"fits": self.fits(row)} for row in self.rows]

    def remedies(self, spelled: Spelled = in_python) -> list[str]:
        """List what would make it fit if nothing does, with options ``spelled`` as the user gives them."""
        least, help_ = self.smallest, []
        if least.largest_batch:
            help_.append(f"a batch of at most {least.largest_batch}, with {least.title}")
        if least.largest_length:
            help_.append(f"a length of at most {least.largest_length}, with {least.title}")
        fixed = f"weights, gradients and states alone take {readable(least.fixed)}"
        if least.states and self.optimizer == "adamw":
            help_.append(f"{spelled('optimizer', 'adamw8bit')}: the states of adamw take {readable(least.states)}")
        if not any(row.group.startswith(ADAPTERS) for row in self.rows):
            adapters = "adapters need neither gradients nor states of the weights"
            help_.append(f"{spelled('lora', 16)}: {fixed}, and {adapters}")
        where = "one card" if self.ranks == 1 else f"each of {self.ranks}"
        help_.append(f"{spelled('ranks', 2 * self.ranks)}, more ranks to share them: {fixed} on {where}")
        return help_

    def _order(self, row: FitRow) -> tuple[float, ...]:
        place = float(self.rows.index(row))
        noisy = float(_NOISES.index(row.noise) if row.noise in _NOISES else len(_NOISES))
        relative = self.relative_time(row)
        time = (1.0, row.time) if relative is None else (0.0, relative)  # what was not measured comes last
        if self.wish == "noise":
            return noisy, *time, place
        if self.wish == "batch":
            return -row.largest_batch, *time, place
        if self.wish == "length":
            return -(row.largest_length or 0), *time, place
        return time[0], round(time[1], 2), noisy, place


_ABOUT = ("memory", "batch", "length", "positions", "optimizer", "ranks", "wish")
_NOISES = (NO_NOISE, AS_PRECISE)


def _record(row: FitRow) -> dict[str, Any]:
    return {
        "group": row.group,
        "way": row.way,
        "code": list(row.code),
        "noise": row.noise,
        "weights": row.weights,
        "gradients": row.gradients,
        "states": row.states,
        "activations": row.activations,
        "peak": {
            "total": row.peak.total,
            "parts": row.peak.parts,
            "place": None if row.peak.place is None else str(row.peak.place),
        },
        "largest_batch": row.largest_batch,
        "largest_length": row.largest_length,
        "seconds": row.seconds,
        "time": row.time,
        "measured_seconds": row.measured_seconds,
        "checkpointed": list(row.checkpointed),
    }

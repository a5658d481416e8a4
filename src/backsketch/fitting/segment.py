"""Segment: a part of a training step's log, from the moment at which a block begins to the next such moment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..memory.live_storages import ROLES, Place
from .launch_counter import Kernel

BEFORE, FORWARD, BACKWARD = "before", "forward", "backward"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a log: what it adds to each role, what it has added when most bytes are there, and where that is."""

    by_role: Tensor
    highest: Tensor
    place: Place | None


@dataclass(frozen=True)
class Segment:
    """What happens from one mark to the next.

    Attributes:
        phase: ``before`` the first block, or the ``forward`` or ``backward`` of a block and what follows it.
        block: which block, or None.
        changes: bytes that come (> 0) and go, in order; (events,), float64.
        roles: the role of each, as an index of ``ROLES``; (events,).
        places: where each came.
        done: how many of the changes came before the block itself was done.
        kept: by how much the bytes that are held for backward grew.
        kernels: what was launched.
    """

    phase: str
    block: int | None
    changes: Tensor
    roles: Tensor
    places: tuple[Place | None, ...]
    done: int = 0
    kept: int = 0
    kernels: tuple[Kernel, ...] = ()

    @cached_property
    def inside(self) -> Stretch:
        """Return what happens until its block is done."""
        return self._stretch(0, self.done)

    @cached_property
    def after(self) -> Stretch:
        """Return what happens from then on."""
        return self._stretch(self.done, len(self.changes))

    def _stretch(self, start: int, end: int) -> Stretch:
        totals = self.changes[start:end].cumsum(0)
        most = start + int(totals.argmax()) + 1 if len(totals) and float(totals.max()) > 0 else start
        place = next((place for place in reversed(self.places[start:most]) if place), None)
        return Stretch(self._between(start, end), self._between(start, most), place)

    def _between(self, start: int, end: int) -> Tensor:
        nothing = torch.zeros(len(ROLES), dtype=torch.float64)
        return nothing.index_add(0, self.roles[start:end], self.changes[start:end])

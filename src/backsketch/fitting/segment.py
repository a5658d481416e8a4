"""Segment: a part of a training step's log, from the moment at which a block begins to the next such moment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..memory.live_storages import ROLES, Place
from .launch_counter import Kernel

BEFORE, FORWARD, BACKWARD = "before", "forward", "backward"


@dataclass(frozen=True)
class Segment:
    """What happens from one mark to the next.

    Attributes:
        phase: ``before`` the first block, or the ``forward`` or ``backward`` of a block and what follows it.
        block: which block, or None.
        changes: bytes that come (> 0) and go, in order; (events,), float64.
        roles: the role of each, as an index of ``ROLES``; (events,).
        places: where each came.
        kept: by how much the bytes that are held for backward grew.
        kernels: what was launched.
    """

    phase: str
    block: int | None
    changes: Tensor
    roles: Tensor
    places: tuple[Place | None, ...]
    kept: int = 0
    kernels: tuple[Kernel, ...] = ()

    @cached_property
    def by_role(self) -> Tensor:
        """Return what it adds to each role from its start to its end."""
        return self._until(len(self.changes))

    @cached_property
    def highest(self) -> Tensor:
        """Return what it has added to each role when most bytes are there."""
        return self._until(self._end)

    @property
    def place(self) -> Place | None:
        """Return where most bytes are there."""
        return next((place for place in reversed(self.places[: self._end]) if place), None)

    @cached_property
    def _end(self) -> int:
        totals = self.changes.cumsum(0)
        return int(totals.argmax()) + 1 if len(totals) and float(totals.max()) > 0 else 0

    def _until(self, end: int) -> Tensor:
        nothing = torch.zeros(len(ROLES), dtype=torch.float64)
        return nothing.index_add(0, self.roles[:end], self.changes[:end])

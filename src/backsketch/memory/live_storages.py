"""Live storages: which bytes exist, since when, and in what role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias
from weakref import ref

import torch
from torch import Tensor

from ..tensor_storages import storage_key, storages

ROLES = ("parameters", "gradients", "optimizer_states", "activations", "transients")
PARAMETERS, GRADIENTS, OPTIMIZER_STATES, ACTIVATIONS, TRANSIENTS = ROLES


@dataclass(frozen=True, slots=True)
class Place:
    """A point of a training step: its phase, the module that ran (or whose backward did), and the operation."""

    phase: str
    module: str | None
    op: str

    def __str__(self) -> str:
        module = "outside the model" if self.module is None else f"in {self.module or 'the model itself'}"
        return f"{self.phase}, {module} ({self.op})"


@dataclass(eq=False, slots=True)
class LiveStorage:
    """One storage. Its role is known only with hindsight: a buffer that ends up in .grad was a gradient all along."""

    role: str
    place: Place | None
    shape: tuple[int, ...]


Change: TypeAlias = tuple[LiveStorage, int, Place | None]


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which most bytes were live: where it was, and every storage of that moment with its bytes."""

    place: Place | None
    live: dict[LiveStorage, int] = field(repr=False)

    @property
    def total(self) -> int:
        return sum(self.live.values())

    @property
    def parts(self) -> dict[str, int]:
        """Return role -> bytes, for every role of ``ROLES``."""
        return {role: sum(size for item, size in self.live.items() if item.role == role) for role in ROLES}


class LiveStorages:
    """A log of bytes that come and go; it holds no storage itself, only weak references to them."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._log: list[Change] = []
        self._known: dict[int, tuple[LiveStorage, int, ref[torch.UntypedStorage]]] = {}

    @property
    def total(self) -> int:
        """Return the bytes that are live now, or were when it stopped."""
        return sum(change for _, change, _ in self._log)

    @property
    def changes(self) -> Sequence[Change]:
        """List all that came and went so far: the storage, by how many bytes it grew or shrank, and where it grew."""
        return self._log

    def see(self, tensor: Tensor, place: Place | None, role: str = TRANSIENTS) -> None:
        """Take note of the storages behind ``tensor``, and give them ``role`` if it outranks the one they have."""
        for storage in storages(tensor):
            key, size = storage_key(storage), storage.nbytes()
            if key not in self._known:
                if self._device is not None and storage.device.type != self._device:
                    continue
                self._known[key] = LiveStorage(role, place, tuple(tensor.shape)), 0, self._watch(storage, key)
            item, known, reference = self._known[key]
            if role != item.role:
                item.role = min(item.role, role, key=ROLES.index)
            if size != known:
                self._known[key] = item, size, reference
                self._log.append((item, size - known, place))

    def keep_for_backward(self) -> None:
        """Call every transient an activation that forward made and that lives on: a checkpoint's input, for one."""
        for item, _, _ in self._known.values():
            if item.role == TRANSIENTS and item.place is not None:
                item.role = ACTIVATIONS

    def stop(self) -> None:
        """Follow the storages no further."""
        self._known.clear()

    def peak(self) -> Peak:
        """Return the first moment at which most bytes were live."""
        totals = list(accumulate(change for _, change, _ in self._log))
        if not totals:
            return Peak(None, {})
        end = totals.index(max(totals)) + 1
        live: dict[LiveStorage, int] = {}
        for item, change, _ in self._log[:end]:
            live[item] = live.get(item, 0) + change
        return Peak(self._log[end - 1][2], {item: size for item, size in live.items() if size})

    def _watch(self, storage: torch.UntypedStorage, key: int) -> ref[torch.UntypedStorage]:
        def freed(_: ref[torch.UntypedStorage]) -> None:
            item, size, _ = self._known.pop(key)
            self._log.append((item, -size, None))

        return ref(storage, freed)

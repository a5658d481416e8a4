"""FamilyProfile: what each family of operations keeps for backward, before and after it is kept in few bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor

from ..tensor_storages import sizes, storage_key, storages, tensors_within


@dataclass(frozen=True, slots=True)
class FamilyProfile:
    """The bytes that a family of operations keeps, each storage counted for the first that saves it."""

    name: str
    before: int
    after: int


@dataclass(slots=True)
class FamilyRecorder:
    """An observer of packing that adds up, by family, what is saved and what is kept of it.

    ``own`` are the storages of the model itself, which count for nobody. What is kept must live as long as this.
    """

    own: frozenset[int]
    _before: dict[str, int] = field(default_factory=dict)
    _after: dict[str, int] = field(default_factory=dict)
    _saved: dict[int, ref[torch.UntypedStorage]] = field(default_factory=dict)
    _kept: set[int] = field(default_factory=set)

    def __call__(self, family: str, tensor: Tensor, kept: object) -> None:
        if not family:
            return
        for storage in storages(tensor):
            key = storage_key(storage)
            known = self._saved.get(key)
            if key in self.own or (known is not None and known() is storage):  # not one that took the place of another
                continue
            self._saved[key] = ref(storage)
            self._before[family] = self._before.get(family, 0) + storage.nbytes()
        for key, size in sizes([tensor] if kept is None else tensors_within(kept)).items():
            if key not in self.own and key not in self._kept:
                self._kept.add(key)
                self._after[family] = self._after.get(family, 0) + size

    def families(self) -> tuple[FamilyProfile, ...]:
        """Return the families, the one that saved most first."""
        names = sorted({*self._before, *self._after}, key=lambda name: -self._before.get(name, 0))
        return tuple(FamilyProfile(name, self._before.get(name, 0), self._after.get(name, 0)) for name in names)

"""Offloaded: what is kept of a saved tensor, handed on to hooks around the forward pass, as ``save_on_cpu`` is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..storage.packed_tensor import PackedMemory, PackedTensor
from ..torch_private import Hooks


@dataclass(frozen=True, eq=False)  # without slots, for weak references
class OffloadedMemory(PackedMemory):
    """Packed memory that outer hooks keep: once for all operations that share it."""

    parts: tuple[Any, ...] = field(kw_only=True)
    release: Callable[[Any], Tensor] = field(kw_only=True)

    @classmethod
    def of_packed(cls, memory: PackedMemory, outer: Hooks) -> OffloadedMemory:
        """Hand the tensors of packed memory on."""
        pack, release = outer
        parts = tuple(pack(each) for each in memory.tensors)
        return cls(**{**vars(memory), "tensors": ()}, parts=parts, release=release)

    @property
    def offloaded(self) -> bool:
        """Tell whether hooks around the forward pass hold it."""
        return True

    def brought_back(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold it."""
        return tuple(self.release(part) for part in self.parts)

    def values(self) -> Tensor:
        """Return the values in their order in memory: (values,)."""
        return self.held_by(self.brought_back()).values()

    def variances(self) -> Tensor:
        """Return the variance of each value's rounding error: (values,)."""
        return self.held_by(self.brought_back()).variances()


@dataclass(frozen=True, slots=True, eq=False)
class Offloaded:
    """What outer hooks keep of a saved tensor, or of the tensors that hold its packed copy."""

    parts: tuple[Any, ...]
    packed: PackedTensor | None
    release: Callable[[Any], Tensor]

    @classmethod
    def of(cls, tensor: Tensor, kept: Any, outer: Hooks) -> Offloaded:
        """Hand a tensor on, or what is kept of it."""
        pack, release = outer
        if kept is None:
            return cls((pack(tensor),), None, release)
        return cls(tuple(pack(each) for each in kept.tensors), kept.held_by(()), release)

    def unpack(self) -> Tensor:
        """Return the saved tensor, or what its packed copy tells of it."""
        parts = tuple(self.release(part) for part in self.parts)
        return parts[0] if self.packed is None else self.packed.held_by(parts).unpack()

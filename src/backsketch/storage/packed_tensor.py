"""PackedTensor: a tensor of any layout in few bits, and the memory that several of them may share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..random_words import Seed
from .groups import GROUP
from .memory_rows import MemoryRows, dense_view, in_whole_groups
from .packing import read, write
from .stored_rows import StoredRows


@dataclass(frozen=True, eq=False)  # without slots, for weak references
class PackedMemory:
    """Rows of memory in few bits: codes, ranges, and values beyond the last whole group of one row as they are."""

    tensors: tuple[Tensor, ...]
    bits: int
    rotated: bool
    features: int
    seed: Seed
    dtype: torch.dtype

    @classmethod
    def of(cls, rows: Tensor, bits: int, rotated: bool, seed: Seed) -> PackedMemory:
        """Round rows at random and pack them: (rows, features)."""
        whole, left_over = in_whole_groups(rows)
        stored = StoredRows.empty(rows, len(whole), whole.shape[1], bits, rotated, seed)
        write(stored, whole)
        tensors = (stored.codes, stored.ranges) + (() if left_over is None else (left_over.clone(),))
        return cls(tensors, bits, rotated, stored.features, seed, rows.dtype)

    def held_by(self, tensors: tuple[Tensor, ...]) -> PackedMemory:
        """Return the same, held by other tensors of equal values, or by none for now."""
        return PackedMemory(tensors, self.bits, self.rotated, self.features, self.seed, self.dtype)

    def brought_back(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold it."""
        return self.tensors

    def values(self) -> Tensor:
        """Return the values in their order in memory: (values,)."""
        codes, ranges, *left_over = self.tensors
        stored = StoredRows(codes, ranges, self.bits, self.rotated, self.features, self.seed)
        if self.dtype == torch.float16:  # rounding may carry the largest values beyond what the type holds
            most = torch.finfo(torch.float16).max / 2
            whole = read(stored, slice(None), self.dtype, scale=0.5).clamp_(-most, most).mul_(2).view(-1)
        else:
            whole = read(stored, slice(None), self.dtype).view(-1)
        return torch.cat((whole, *left_over)) if left_over else whole

    def variances(self) -> Tensor:
        """Return the variance of each value's rounding error: (values,)."""
        _, ranges, *left_over = self.tensors
        steps = ranges[..., 1].to(torch.float32)
        spread = steps.square().div_(12).repeat_interleave(GROUP, 1)[:, : self.features].reshape(-1)
        if not self.rotated:  # zeros are exact in a group whose step has its sign set
            exact = steps.signbit().repeat_interleave(GROUP, 1)[:, : self.features].reshape(-1)
            spread = spread.masked_fill(exact & (self.values()[: len(spread)] == 0), 0)
        return torch.cat((spread, *(torch.zeros_like(each) for each in left_over))) if left_over else spread


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """A view of packed memory."""

    memory: PackedMemory
    shape: torch.Size
    strides: tuple[int, ...]

    def unpack(self) -> Tensor:
        """Return the tensor, in dense memory."""
        return dense_view(self.memory.values(), self.shape, self.strides)

    def variance(self) -> Tensor:
        """Return the variance of each value's rounding error, in dense memory."""
        return dense_view(self.memory.variances(), self.shape, self.strides)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold it."""
        return self.memory.brought_back()

    def held_by(self, tensors: tuple[Tensor, ...]) -> PackedTensor:
        """Return the same, held by other tensors of equal values, or by none for now."""
        return replace(self, memory=self.memory.held_by(tensors))


def rows_in_memory(tensor: Tensor) -> tuple[Tensor, MemoryRows]:
    """Return a tensor, copied if its values do not lie in rows, and its rows."""
    rows = MemoryRows.of(tensor)
    if rows is None:
        tensor = tensor.contiguous()
        rows = MemoryRows.of(tensor)
        assert rows is not None
    return tensor, rows

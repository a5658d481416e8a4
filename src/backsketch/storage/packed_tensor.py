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

_MEAN_OF = 512  # rows, roughly


@dataclass(frozen=True, eq=False)  # without slots, for weak references
class PackedMemory:
    """Rows of memory in few bits: codes and ranges, and beside them few values in full.

    These are the ``centred`` rows' mean, or else what is beyond the last whole group of a single row.
    """

    tensors: tuple[Tensor, ...]
    bits: int
    rotated: bool
    features: int
    seed: Seed
    dtype: torch.dtype
    centred: bool = False

    @classmethod
    def of(cls, rows: Tensor, bits: int, rotated: bool, seed: Seed, *, centred: bool = False) -> PackedMemory:
        """Round rows at random and pack them, if ``centred`` without their mean, which is kept: (rows, features)."""
        mean = _mean(rows) if centred else None
        whole, left_over = (rows, None) if centred else in_whole_groups(rows)
        stored = StoredRows.empty(rows, len(whole), whole.shape[1], bits, rotated, seed)
        write(stored, whole, mean=mean)
        beside = mean if left_over is None else left_over.clone()
        tensors = (stored.codes, stored.ranges) + (() if beside is None else (beside,))
        return cls(tensors, bits, rotated, stored.features, seed, rows.dtype, centred)

    @property
    def offloaded(self) -> bool:
        """Tell whether hooks around the forward pass hold it."""
        return False

    def held_by(self, tensors: tuple[Tensor, ...]) -> PackedMemory:
        """Return the same, held by other tensors of equal values, or by none for now."""
        return PackedMemory(tensors, self.bits, self.rotated, self.features, self.seed, self.dtype, self.centred)

    def brought_back(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold it."""
        return self.tensors

    def values(self) -> Tensor:
        """Return the values in their order in memory: (values,)."""
        codes, ranges, *beside = self.tensors
        stored = StoredRows(codes, ranges, self.bits, self.rotated, self.features, self.seed)
        halved = self.dtype == torch.float16  # rounding may carry the largest values beyond what the type holds
        whole = read(stored, slice(None), self.dtype, scale=0.5 if halved else 1.0)
        if self.centred:
            whole.add_(beside.pop().to(self.dtype), alpha=0.5 if halved else 1.0)
        if halved:
            most = torch.finfo(torch.float16).max / 2
            whole.clamp_(-most, most).mul_(2)
        return torch.cat((whole.view(-1), *beside)) if beside else whole.view(-1)

    def variances(self) -> Tensor:
        """Return the variance of each value's rounding error: (values,)."""
        _, ranges, *beside = self.tensors
        steps = ranges[..., 1].to(torch.float32)
        spread = steps.square().div_(12).repeat_interleave(GROUP, 1)[:, : self.features].reshape(-1)
        if self.centred:
            return spread
        if not self.rotated:  # zeros are exact in a group whose step has its sign set
            exact = steps.signbit().repeat_interleave(GROUP, 1)[:, : self.features].reshape(-1)
            spread = spread.masked_fill(exact & (self.values()[: len(spread)] == 0), 0)
        return torch.cat((spread, *(torch.zeros_like(each) for each in beside))) if beside else spread


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """A view of packed memory."""

    memory: PackedMemory
    shape: torch.Size
    strides: tuple[int, ...]

    @property
    def offloaded(self) -> bool:
        """Tell whether hooks around the forward pass hold it."""
        return self.memory.offloaded

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


def _mean(rows: Tensor) -> Tensor:
    """Return the mean row in bf16, with zeros where it is not finite: a NaN must not spread along its column.

    Any row would do, since the same is added again. The mean of some rows is as good and takes less time. They are an
    odd number of rows apart, not whole sequences, whose first tokens differ from all others. Of three neighbours the
    middle value counts, twice, so that a few huge values do not move the mean away from all other rows.
    """
    some = rows[:: len(rows) // _MEAN_OF | 1]
    middle = _middle_of_three(_middle_of_three(some))
    return middle.mean(0).to(torch.bfloat16).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _middle_of_three(rows: Tensor) -> Tensor:
    """Return the middle one of each three values below each other: (rows, features) -> (rows // 3, features)."""
    one, two, three = (rows[first : len(rows) // 3 * 3 : 3] for first in range(3))
    return torch.maximum(torch.minimum(one, two), torch.minimum(torch.maximum(one, two), three))

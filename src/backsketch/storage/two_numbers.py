"""Tensors that hold zero and one other number, as a mask of dropout does on a CPU, in one bit a number, exact."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import cpu_flags
from .flags import read_flags, write_flags
from .packing import fused_kernels_allowed


def write_two_numbers(numbers: Tensor, other: float) -> Tensor | None:
    """Return the flags of the numbers that are ``other``, a positive number of their type: (...) -> (bytes,) uint8.

    None if one is neither that nor zero. Accelerators are not asked, since they would be waited for.
    """
    if fused_kernels_allowed() and cpu_flags.serves(numbers, numbers.numel(), numbers.dtype):
        return cpu_flags.write(numbers, other)
    if numbers.is_cpu and not bool(((numbers == 0) | (numbers == other)).all()):
        return None
    return write_flags(numbers != 0)


def read_two_numbers(flags: Tensor, shape: Sequence[int], dtype: torch.dtype, other: float) -> Tensor:
    """Return a tensor that is ``other``, rounded to ``dtype``, where a flag is set, and zero elsewhere."""
    if fused_kernels_allowed() and cpu_flags.serves(flags, torch.Size(shape).numel(), dtype):
        return cpu_flags.read(flags, shape, dtype, torch.tensor(other, dtype=dtype, device="cpu").item())
    is_other = read_flags(flags, shape)
    return is_other.new_zeros(is_other.shape, dtype=dtype).masked_fill_(is_other, other)  # also where it is infinite

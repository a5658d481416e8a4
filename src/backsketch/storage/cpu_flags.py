"""The fused form of ``two_numbers`` on a CPU: numbers to flags and back in one pass each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cpu_library import library, threads_for
from ..torch_private import has_plain_memory
from .cpu_kernel import serves_for
from .flags import flag_bytes

_DTYPES = (torch.float32, torch.bfloat16)


def serves(tensor: Tensor, count: int, dtype: torch.dtype) -> bool:
    """Tell whether the kernel can read ``count`` numbers of a tensor, or its flags. It never depends on values."""
    return (
        tensor.is_cpu and dtype in _DTYPES and tensor.is_contiguous() and has_plain_memory(tensor) and serves_for(count)
    )


def write(numbers: Tensor, other: float) -> Tensor | None:
    """Do what ``two_numbers.write_two_numbers`` does."""
    count = numbers.numel()
    flags = numbers.new_empty(flag_bytes(count), dtype=torch.uint8)
    only_two = library().write_flags(  # type: ignore[union-attr]
        numbers.dtype == torch.bfloat16, numbers.data_ptr(), count, other, flags.data_ptr(), threads_for(count)
    )
    return flags if only_two else None


def read(flags: Tensor, shape: Sequence[int], dtype: torch.dtype, other: float) -> Tensor:
    """Do what ``two_numbers.read_two_numbers`` does."""
    numbers = flags.new_empty(tuple(shape), dtype=dtype)
    library().read_flags(  # type: ignore[union-attr]
        dtype == torch.bfloat16,
        flags.data_ptr(),
        numbers.numel(),
        other,
        numbers.data_ptr(),
        threads_for(numbers.numel()),
    )
    return numbers

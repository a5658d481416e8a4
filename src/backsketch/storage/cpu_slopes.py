"""The fused form of stored slopes on a CPU: one pass from x to codes, and one from codes and gradient to their product.

Slopes of other functions than those below are computed in plain PyTorch, slab by slab, and coded in one pass each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu_library import library, threads_for
from ..random_words import DITHER_STREAM, Seed, line
from ..torch_private import has_plain_memory
from .cpu_kernel import serves_for
from .flat_slabs import flat_slab, flat_slabs
from .groups import GROUP
from .sizes import packed_bytes
from .slope_functions import GELU, GELU_TANH, SIGMOID, SILU, TANH, Slope

_GIVEN = 0  # the slopes themselves
_NUMBERS = {GELU: 1, GELU_TANH: 2, SILU: 3, SIGMOID: 4, TANH: 5}  # as cpu_slopes.cpp counts its functions
_DTYPES = (torch.float32, torch.bfloat16)


def serves(x: Tensor, seed: Seed) -> bool:
    """Tell whether the kernel can read a source, or a gradient. It never depends on values."""
    return (
        x.device.type == "cpu"
        and x.dtype in _DTYPES
        and has_plain_memory(x)
        and isinstance(seed, int)
        and serves_for(x.numel())
    )


def write(slope: Slope, source: Tensor, bits: int, seed: Seed) -> Tensor:
    """Do what ``slopes.write_slopes`` does."""
    codes = source.new_empty(packed_bytes(source.numel(), bits), dtype=torch.uint8)
    per_step = (2**bits - 1) / (slope.high - slope.low)
    for slab in [slice(0, source.numel())] if slope in _NUMBERS and source.is_contiguous() else flat_slabs(source):
        values = flat_slab(source, slab)
        if slope not in _NUMBERS:
            values = slope.at(values.to(torch.float32)).contiguous()
        first_group = slab.start // GROUP
        library().write_slopes(  # type: ignore[union-attr]
            _NUMBERS.get(slope, _GIVEN),
            values.dtype == torch.bfloat16,
            values.data_ptr(),
            len(values),
            first_group,
            *line(seed, DITHER_STREAM),
            slope.low,
            per_step,
            bits,
            codes.data_ptr() + packed_bytes(slab.start, bits),
            threads_for(len(values)),
        )
    return codes


def times(slope: Slope, grad: Tensor, codes: Tensor, bits: int, seed: Seed) -> Tensor:
    """Do what ``slopes.times_slopes`` does."""
    codes = codes.contiguous()  # hooks on saved tensors may have moved them
    out = torch.empty_like(grad, memory_format=torch.contiguous_format)
    step = (slope.high - slope.low) / (2**bits - 1)
    for slab in [slice(0, grad.numel())] if grad.is_contiguous() else flat_slabs(grad):
        values = flat_slab(grad, slab)
        library().times_slopes(  # type: ignore[union-attr]
            grad.dtype == torch.bfloat16,
            values.data_ptr(),
            codes.data_ptr() + packed_bytes(slab.start, bits),
            len(values),
            slab.start // GROUP,
            *line(seed, DITHER_STREAM),
            step,
            slope.low + step / 2,
            bits,
            out.view(-1)[slab].data_ptr(),
            threads_for(len(values)),
        )
    return out

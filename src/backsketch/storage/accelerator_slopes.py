"""The fused form of stored slopes on an accelerator: one launch of a Triton kernel each way.

Slopes of other functions than those below are computed in plain PyTorch, and coded in one launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..random_words import Seed
from .accelerator_kernel import dither_line, on_device, serves_for
from .sizes import packed_bytes
from .slope_functions import GELU, GELU_TANH, SIGMOID, SILU, TANH, Slope

_GIVEN = 0  # the slopes themselves
_NUMBERS = {GELU: 1, GELU_TANH: 2, SILU: 3, SIGMOID: 4, TANH: 5}  # as triton_slopes.py counts its functions


def serves(x: Tensor, seed: Seed) -> bool:
    """Tell whether the kernels can read a source, or a gradient."""
    return serves_for(x, x.dtype)


def write(slope: Slope, source: Tensor, bits: int, seed: Seed) -> Tensor:
    """Do what ``slopes.write_slopes`` does, in one launch."""
    values = source if slope in _NUMBERS else slope.at(source.to(torch.float32))
    per_step = (2**bits - 1) / (slope.high - slope.low)
    codes: Tensor = torch.ops.backsketch.pack_slopes(
        values.reshape(-1), _NUMBERS.get(slope, _GIVEN), slope.low, per_step, *dither_line(seed), bits
    )
    return codes


def times(slope: Slope, grad: Tensor, codes: Tensor, bits: int, seed: Seed) -> Tensor:
    """Do what ``slopes.times_slopes`` does, in one launch."""
    step = (slope.high - slope.low) / (2**bits - 1)
    product: Tensor = torch.ops.backsketch.times_slopes(
        grad.contiguous(), codes, step, slope.low + step / 2, *dither_line(seed), bits
    )
    return product


def _pack(values: Tensor, *arguments: Any) -> Tensor:
    from .triton_slopes_launch import pack_slopes

    with on_device(values.device):
        return pack_slopes(values, *arguments)


def _times(grad: Tensor, *arguments: Any) -> Tensor:
    from .triton_slopes_launch import times_slopes

    with on_device(grad.device):
        return times_slopes(grad, *arguments)


def _packed_shape(values: Tensor, *arguments: Any) -> Tensor:
    return values.new_empty(packed_bytes(len(values), arguments[-1]), dtype=torch.uint8)


def _product_shape(grad: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(grad)


_library: Any = torch.library.Library("backsketch", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "pack_slopes(Tensor values, int function, float low, float per_step, int slope, int offset, Tensor? line, int bits)"
    " -> Tensor"
)
_library.define(
    "times_slopes(Tensor grad, Tensor codes, float step, float base, int slope, int offset, Tensor? line, int bits)"
    " -> Tensor"
)
_library.impl("pack_slopes", _packed_shape, "Meta")
_library.impl("times_slopes", _product_shape, "Meta")
for _key in ("CUDA", "XPU"):
    _library.impl("pack_slopes", _pack, _key)
    _library.impl("times_slopes", _times, _key)

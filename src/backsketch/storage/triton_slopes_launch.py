"""How the Triton kernels of slopes are launched: once for all groups."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .groups import group_count
from .sizes import packed_bytes
from .triton_slopes import pack_slopes_kernel, times_slopes_kernel

ROWS, WARPS = 32, 8  # groups and warps of a program: with four warps, a thread takes up to 136 registers
_OPTIONS = {"ROWS": ROWS, "num_warps": WARPS, "enable_fp_fusion": False}  # the roundings of the reference


def pack_slopes(
    values: Tensor,
    function: int,
    low: float,
    per_step: float,
    slope: int,
    offset: int,
    line: Tensor | None,
    bits: int,
) -> Tensor:
    """Return the codes of the slopes of a function at some values: (count,) -> (bytes,) uint8."""
    count = len(values)
    codes = values.new_empty(packed_bytes(count, bits), dtype=torch.uint8)
    if count:
        pack_slopes_kernel[_grid(count)](
            values,
            codes,
            line,
            slope if line is None else 0,
            offset if line is None else 0,
            count,
            low,
            per_step,
            FUNCTION=function,
            BITS=bits,
            **_OPTIONS,
        )
    return codes


def times_slopes(
    grad: Tensor,
    codes: Tensor,
    step: float,
    base: float,
    slope: int,
    offset: int,
    line: Tensor | None,
    bits: int,
) -> Tensor:
    """Return a gradient times the slopes that codes mean, in its own shape and type."""
    out = torch.empty_like(grad)
    if grad.numel():
        times_slopes_kernel[_grid(grad.numel())](
            grad,
            codes.contiguous(),
            out,
            line,
            slope if line is None else 0,
            offset if line is None else 0,
            grad.numel(),
            step,
            base,
            BITS=bits,
            **_OPTIONS,
        )
    return out


def _grid(count: int) -> tuple[int]:
    return (triton.cdiv(group_count(count), ROWS),)

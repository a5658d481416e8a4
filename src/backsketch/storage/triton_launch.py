"""How the Triton kernels are launched: once for all groups of some rows, with a second launch where one is slower."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
import triton
from torch import Tensor

from .groups import GROUP
from .rotation import rotate, rotate_back
from .triton_kernels import pack_kernel, unpack_kernel

ROWS, WARPS = 32, 4  # of a program: each thread then loads every slot once
PACK_REGISTERS = 128  # of a thread at most: without a limit, two of the 72 variants for sm_90 spill registers
_LEAST_FOR_BUTTERFLIES = 8
_OPTIONS = {"ROWS": ROWS, "num_warps": WARPS, "enable_fp_fusion": False}  # the roundings of the reference


def pack(
    x: Tensor,
    chosen: Tensor | None,
    mean: Tensor | None,
    codes: Tensor,
    ranges: Tensor,
    first_column: int,
    slope: int,
    offset: int,
    line: Tensor | None,
    bits: int,
    rotated: bool,
) -> None:
    """Write x, or its ``chosen`` rows, into codes and ranges, from ``first_column`` on."""
    rows = len(codes)
    if not rows:
        return
    for start, full, rest in _parts(x.shape[1], rotated):
        matrix = _matrix(rest, x.device, back=False) if rotated else None
        limit = {"maxnreg": PACK_REGISTERS} if torch.version.cuda and matrix is None else {}
        pack_kernel[_grid(rows, full, rest)](
            x[:, start:],
            None if chosen is None else chosen.contiguous(),
            None if mean is None else mean[start:].contiguous(),
            codes,
            ranges.view(torch.int16),
            line,
            matrix,
            slope if line is None else 0,
            offset if line is None else 0,
            rows,
            full,
            (first_column + start) // GROUP,
            x.stride(0),
            x.stride(1),
            codes.stride(0),
            ranges.stride(0),
            REST=rest,
            BITS=bits,
            ROTATED=rotated,
            **_OPTIONS,
            **limit,
        )


def unpack(
    codes: Tensor,
    ranges: Tensor,
    places: Tensor | None,
    first: int,
    rows: int,
    features: int,
    slope: int,
    offset: int,
    line: Tensor | None,
    bits: int,
    rotated: bool,
    turn: bool,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``scale`` times the stored rows from ``first`` on, or those that ``places`` names there, zeros for −1."""
    out = codes.new_empty(rows, features, dtype=dtype)
    if not rows:
        return out
    turn = rotated and turn
    for start, full, rest in _parts(features, turn):
        unpack_kernel[_grid(rows, full, rest)](
            codes,
            ranges.view(torch.int16),
            None if places is None else places.contiguous(),
            out[:, start:],
            line,
            _matrix(rest, codes.device, back=True) if turn else None,
            slope if line is None else 0,
            offset if line is None else 0,
            float(scale),
            first,
            rows,
            full,
            start // GROUP,
            codes.stride(0),
            ranges.stride(0),
            out.stride(0),
            REST=rest,
            BITS=bits,
            ROTATED=rotated,
            TURN=turn,
            **_OPTIONS,
        )
    return out


def _parts(features: int, rotated: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (first column, number of full groups, size of a shorter one) for each launch.

    A product with a matrix takes so many registers that full groups would be slower in the same kernel.
    """
    full, rest = features // GROUP, features % GROUP
    if rotated and _needs_matrix(rest) and full:
        yield 0, full, 0
        yield full * GROUP, 0, rest
    elif features:
        yield 0, full, rest


def _grid(rows: int, full: int, rest: int) -> tuple[int]:
    return (triton.cdiv(rows, ROWS) * (full + (rest > 0)),)


def _needs_matrix(size: int) -> bool:
    return size > 0 and (size < _LEAST_FOR_BUTTERFLIES or size & (size - 1) != 0)


@lru_cache(maxsize=64)
def _matrix(size: int, device: torch.device, *, back: bool) -> Tensor | None:
    """Return the matrix by which a shorter group is multiplied, if it needs one: (size, size)."""
    if not _needs_matrix(size):
        return None
    with torch.inference_mode(False):
        one_by_one = torch.eye(size, dtype=torch.float64, device="cpu")
        return (rotate_back(one_by_one) if back else rotate(one_by_one)).to(torch.float32).to(device)

"""The law of stored slopes, in plain PyTorch, on every device and in every type.

Fused kernels do the same in one pass; they are compared with this. docs/storage.md defines every byte.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..numerics import compute_dtype
from ..random_words import Seed
from .codes import group_bytes, join, split, whole_part
from .dither import column_dither, dither, row_dither
from .flat_slabs import flat_slab, flat_slabs
from .groups import GROUP, group_count
from .sizes import packed_bytes
from .slope_functions import Slope


def write(slope: Slope, source: Tensor, bits: int, seed: Seed) -> Tensor:
    """Do what ``slopes.write_slopes`` does: on a CPU a slab of values at a time, elsewhere all at once."""
    levels = 2**bits - 1
    codes = source.new_empty(packed_bytes(source.numel(), bits), dtype=torch.uint8)
    shift = row_dither(seed, group_count(source.numel()), source.device)
    for slab in flat_slabs(source):
        slopes = slope.at(flat_slab(source, slab).to(compute_dtype(source.dtype))) - slope.low
        for values, groups, size in _parts(slab):
            steps = _dither(shift[groups], size, slopes.dtype)
            steps.add_(slopes[values].view(-1, size), alpha=levels / (slope.high - slope.low)).clamp_(0, levels)
            join(whole_part(steps, bits), bits, out=_bytes_of(codes, bits, groups, size))
    return codes


def times(slope: Slope, grad: Tensor, codes: Tensor, bits: int, seed: Seed) -> Tensor:
    """Do what ``slopes.times_slopes`` does."""
    step = (slope.high - slope.low) / (2**bits - 1)
    out = torch.empty_like(grad, memory_format=torch.contiguous_format)
    shift = row_dither(seed, group_count(grad.numel()), grad.device)
    for slab in flat_slabs(grad):
        factors, products = flat_slab(grad, slab), out.view(-1)[slab]
        for values, groups, size in _parts(slab):
            dithers = _dither(shift[groups], size, compute_dtype(grad.dtype))
            slopes = torch.sub(split(_bytes_of(codes, bits, groups, size), bits, size), dithers, out=dithers)
            slopes = slopes.mul_(step).add_(slope.low + step / 2).view(-1)
            products[values] = slopes.mul_(factors[values])
    return out


def _parts(slab: slice) -> Iterator[tuple[slice, slice, int]]:
    """Yield (values in the slab, groups, size of a group) for the full groups of a slab, and for a shorter last one."""
    count, first = slab.stop - slab.start, slab.start // GROUP
    full, rest = count // GROUP, count % GROUP
    if full:
        yield slice(0, full * GROUP), slice(first, first + full), GROUP
    if rest:
        yield slice(full * GROUP, count), slice(first + full, first + full + 1), rest


def _dither(shift: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return u for each value of some groups: (groups, 1) -> (groups, size)."""
    return dither(shift.to(dtype), column_dither(0, size, shift.device, dtype))


def _bytes_of(codes: Tensor, bits: int, groups: slice, size: int) -> Tensor:
    """Return the bytes of some groups of ``size`` values each: a view, (groups, bytes)."""
    start, count, width = groups.start * group_bytes(GROUP, bits), groups.stop - groups.start, group_bytes(size, bits)
    return codes[start : start + count * width].view(count, width)

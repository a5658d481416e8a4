"""How kept rows are stored: as they are, or in 8, 4 or 2 bits a value, rounded at random so that the mean is right.

Each row is cut into groups of GROUP values. A group is stored as codes 0 … 2^bits − 1 between its least and its largest
value. Rounding adds a dither u and drops the fraction, so E[stored] = value. One random number a row is enough:
u = frac(r + φ·column) is uniform for every value, and only roundings in different rows must be independent for
the gradient's noise to be that of independent rounding.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

from ..numerics import compute_dtype, row_slabs

GROUP = 128
_GOLDEN = 0.6180339887498949


def pack(
    x: Tensor,
    bits: int,
    generator: torch.Generator | None,
    chosen: Tensor | None = None,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Round x at random to ``bits`` bits: (rows, features) -> codes (rows, bytes), ranges (rows, groups, 2).

    ``ranges`` holds each group's least value and step. A group with NaN or infinity comes back without a finite value.
    With ``chosen``, the indices of some rows, only these are stored; with ``mean``, (features,), what is left of each
    after it is taken off. They are never all copied at once.
    """
    rows, features = len(x) if chosen is None else len(chosen), x.shape[1]
    dtype = compute_dtype(x.dtype)
    levels = 2**bits - 1
    groups = group_count(features)
    codes = x.new_empty(rows, packed_bytes(features, bits), dtype=torch.uint8)
    ranges = x.new_empty(rows, groups, 2, dtype=dtype)
    shift = torch.rand(rows, 1, generator=generator, device=x.device, dtype=torch.float32).to(dtype)
    column = _column_dither(groups, x.device, dtype)
    slabs = row_slabs(rows, features)
    for slab in islice(slabs, 1) if x.is_meta else slabs:  # one tells the sizes of all
        part = x[slab] if chosen is None else x.index_select(0, chosen[slab])
        values = _grouped(part.to(dtype) if mean is None else part.to(dtype) - mean.to(dtype), groups)
        least, step, inverse = _grid(values, levels)
        dither = torch.add(shift[slab], column).frac_().view_as(values)
        dither.sub_(least * inverse).addcmul_(values, inverse).clamp_(0, levels)
        _join(_whole_part(dither.view(len(values), -1), bits), bits, out=codes[slab])
        torch.cat((least, step), dim=-1, out=ranges[slab])
    return codes, ranges


def unpack(codes: Tensor, ranges: Tensor, bits: int, features: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return ``scale`` times the stored values: codes (rows, bytes), ranges (rows, groups, 2) -> (rows, features).

    At a scale of 1/2 no group overflows on the way, however far its values are apart.
    """
    groups = ranges.shape[1]
    values = _split(codes, bits, groups * GROUP).to(ranges.dtype).view(len(codes), groups, GROUP)
    least, step = (ranges * scale).unsqueeze(-1).unbind(2)
    return values.mul_(step).add_(least).view(len(codes), groups * GROUP)[:, :features].to(dtype)


def rounding_variance(x: Tensor, bits: int) -> Tensor:
    """Return the variance that ``pack`` adds to each row, summed over its values: (rows, features) -> (rows,).

    A value that lies the fraction f of a step above a level is rounded up with probability f: step² · f(1 − f).
    """
    rows, features = x.shape
    values = _grouped(x, group_count(features))
    least, step, inverse = _grid(values, 2**bits - 1)
    fraction = ((values - least) * inverse).frac()
    return (step.square() * fraction * (1 - fraction)).view(rows, -1)[:, :features].sum(1)


def packed_bytes(features: int, bits: int) -> int:
    """Return how many bytes the codes of one row take."""
    return -(-features * bits // 8)


def group_count(features: int) -> int:
    """Return how many groups one row has."""
    return -(-features // GROUP)


def stored_bytes(rows: int, features: int, bits: int | None, itemsize: int) -> int:
    """Return how many bytes ``rows`` kept rows take, codes and ranges together."""
    if bits is None:
        return rows * features * itemsize
    return rows * (packed_bytes(features, bits) + group_count(features) * 2 * max(itemsize, 4))


@lru_cache(maxsize=64)
def _column_dither(groups: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return frac(φ·column): (groups · GROUP,)."""
    column = torch.arange(groups * GROUP, device="cpu", dtype=torch.float64)  # not every device has fp64
    return (column * _GOLDEN).frac().to(dtype).to(device)


def _grid(values: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each group's least value, step, and 1/step, which is 0 for a constant group: its code 0 is exact."""
    least, largest = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    step = largest / levels - least / levels  # not (largest - least): that may overflow
    return least, step, step.reciprocal().nan_to_num_(nan=math.nan, posinf=0)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """View the rows as groups, the last one filled up with its own last value so that its range is unchanged."""
    missing = groups * GROUP - x.shape[1]
    if missing:
        x = torch.cat((x, x[:, -1:].expand(-1, missing)), dim=1)
    return x.reshape(len(x), groups, GROUP)


def _whole_part(values: Tensor, bits: int) -> Tensor:
    """Drop the fractions, as ``to(torch.uint8)`` does; going by a signed type takes PyTorch half of that time."""
    return values.to(torch.int16).to(torch.uint8) if bits == 8 else values.to(torch.int8).view(torch.uint8)


def _join(codes: Tensor, bits: int, *, out: Tensor) -> None:
    """Put 8/bits codes in a byte; neighbours in a byte come from different parts of the row, so slices stay whole."""
    width = out.shape[1]
    if bits == 8:
        out.copy_(codes[:, :width])
        return
    codes.bitwise_and_(2**bits - 1)  # what NaN became must not spill into its neighbours
    joined = codes[:, :width]
    for part in range(1, 8 // bits):
        joined = torch.add(joined, codes[:, part * width : (part + 1) * width], alpha=2 ** (part * bits), out=out)


def _split(joined: Tensor, bits: int, count: int) -> Tensor:
    width, last = joined.shape[1], 8 // bits - 1
    codes = joined.new_empty(len(joined), count)
    for part in range(last + 1):
        target = codes[:, part * width : (part + 1) * width]
        shifted = torch.bitwise_right_shift(joined, part * bits, out=target) if part else joined
        if part < last or not part:  # nothing is left above the last part
            torch.bitwise_and(shifted, 2**bits - 1, out=target)
    return codes

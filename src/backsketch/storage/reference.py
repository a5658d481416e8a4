"""The law of storage: rows to codes and back in plain PyTorch, on every device and in every type.

Fused kernels do the same in one pass; they are compared with this. docs/storage.md defines every byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics import compute_dtype, row_slabs
from .codes import group_bytes, join, split, whole_part
from .dither import column_dither, dither, row_dither
from .groups import GROUP, group_sizes, parts_of
from .ranges import Grid
from .rotation import rotate, rotate_back
from .stored_rows import StoredRows


def write(stored: StoredRows, x: Tensor, chosen: Tensor | None, mean: Tensor | None, first_column: int) -> None:
    """Do what ``packing.write`` does: on a CPU a slab of rows at a time, elsewhere all at once."""
    dtype = compute_dtype(x.dtype)
    shift = row_dither(stored.seed, stored.rows, x.device)
    for slab in _slabs(x, stored.rows):
        rows = slab if chosen is None else chosen[slab]
        for columns, groups in parts_of(x.shape[1]):
            own = None if mean is None else mean[columns].to(dtype)
            values = _some(x[:, columns], rows, own, dtype)
            groups = slice(groups.start + first_column // GROUP, groups.stop + first_column // GROUP)
            _write_groups(stored, slab, values, groups, shift[slab])


def _slabs(x: Tensor, rows: int) -> list[slice]:
    """Split the rows for a CPU's cache; on other devices each step has its price, whatever its size."""
    if x.device.type != "cpu":
        return [slice(0, rows)]
    return list(row_slabs(rows, -(-x.shape[1] * 2 // 3)))  # larger ones, since each takes many small steps


def _write_groups(stored: StoredRows, slab: slice, values: Tensor, groups: slice, shift: Tensor) -> None:
    count, size = group_sizes(groups, values.shape[1])
    values = values.reshape(-1, count, size)
    if stored.rotated:
        values = rotate(values)
    grid = Grid.of(values, stored.bits, may_keep_zeros=not stored.rotated)
    codes = _dither(shift, groups, size, values.dtype)
    if grid.zeros is None:
        own = stored.rotated  # else they may be the input itself
        codes.addcmul_(values.sub_(grid.least) if own else values - grid.least, grid.inverse_step())
    else:
        codes.add_(grid.zeros).addcmul_(values - grid.least, grid.inverse_step())
        codes.masked_fill_((values == 0).logical_and_(grid.zeros), 0)
    join(whole_part(codes, stored.bits), stored.bits, out=_bytes_of(stored.codes[slab], stored.bits, groups, size))
    grid.store(stored.ranges[slab, groups])


def read(
    stored: StoredRows,
    slab: slice,
    dtype: torch.dtype,
    scale: float,
    rotate_rows_back: bool,
    places: Tensor | None,
) -> Tensor:
    """Do what ``packing.read`` does."""
    shift = row_dither(stored.seed, stored.rows, stored.codes.device)
    codes, ranges = stored.codes, stored.ranges
    if places is None:
        codes, ranges, shift = codes[slab], ranges[slab], shift[slab]
    else:
        at = places[slab].clamp(min=0)
        codes, shift = codes.index_select(0, at), shift.index_select(0, at)
        ranges = ranges.index_select(0, at).masked_fill_((places[slab] < 0).view(-1, 1, 1), 0)
    parts = []
    for columns, groups in parts_of(stored.features):
        size = group_sizes(groups, columns.stop - columns.start)[1]
        joined = _bytes_of(codes, stored.bits, groups, size)
        grid = Grid.read(ranges[:, groups], compute_dtype(dtype), scale, may_keep_zeros=not stored.rotated)
        values = _values(split(joined, stored.bits, size), grid, _dither(shift, groups, size, grid.step.dtype))
        if stored.rotated and rotate_rows_back:
            values = rotate_back(values)
        parts.append(values.flatten(1).to(dtype))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1) if parts else codes.new_empty(len(codes), 0, dtype=dtype)


def _values(codes: Tensor, grid: Grid, dither: Tensor) -> Tensor:
    """Return the values that codes mean: (rows, groups, size)."""
    values = torch.sub(codes, dither, out=dither)
    if grid.zeros is None:
        return torch.addcmul(torch.add(grid.least, grid.step, alpha=0.5), values, grid.step, out=values)
    values.mul_(grid.step).add_(grid.least + grid.step * (0.5 - grid.zeros.to(values.dtype)))
    return values.mul_((codes != 0).logical_or_(~grid.zeros))


def _bytes_of(codes: Tensor, bits: int, groups: slice, size: int) -> Tensor:
    """Return the bytes of some groups of ``size`` values each: a view, (rows, groups, bytes)."""
    start = groups.start * group_bytes(GROUP, bits)
    count, width = groups.stop - groups.start, group_bytes(size, bits)
    joined = codes[:, start : start + count * width]
    return joined.view(len(joined), count, width)


def _dither(shift: Tensor, groups: slice, size: int, dtype: torch.dtype) -> Tensor:
    """Return u for each value: (rows, groups, size)."""
    count = groups.stop - groups.start
    column = column_dither(groups.start * GROUP, count * size, shift.device, dtype)
    return dither(shift.to(dtype), column).view(-1, count, size)


def _some(x: Tensor, rows: slice | Tensor, mean: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return some rows without the mean. They may be a view of x: do not change them."""
    some = (x[rows] if isinstance(rows, slice) else x.index_select(0, rows)).to(dtype)
    return some if mean is None else some - mean

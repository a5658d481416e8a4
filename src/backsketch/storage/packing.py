"""How kept rows are stored in 8, 4, 3 or 2 bits a value: rounded at random, so that the mean is right.

Each row is cut into groups of GROUP values. A group is stored as codes 0 … 2^bits − 1 between its least and its largest
value. Rounding adds a dither u to the value in steps and drops the fraction; u is made again from the seed and
subtracted when the value is read. The error is then uniform in ± half a step and does not depend on the value: its mean
is 0 and its variance step²/12. docs/storage.md defines every byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..numerics import compute_dtype, row_slabs
from ..random_words import Seed
from .codes import group_bytes, join, split
from .dither import column_dither, row_dither
from .groups import GROUP, group_count, group_sizes, parts_of
from .ranges import Grid
from .rotation import rotate, rotate_back
from .sizes import packed_bytes


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows in few bits: codes (rows, bytes) uint8 and ranges (rows, groups, 2) bf16, and what it takes to read them."""

    codes: Tensor
    ranges: Tensor
    bits: int
    rotated: bool
    features: int
    shift: Tensor  # the random number of each row: (rows, 1)

    @classmethod
    def empty(cls, like: Tensor, rows: int, features: int, bits: int, rotated: bool, seed: Seed) -> StoredRows:
        """Return room for ``rows`` rows on the device of ``like``."""
        codes = like.new_empty(rows, packed_bytes(features, bits), dtype=torch.uint8)
        ranges = like.new_empty(rows, group_count(features), 2, dtype=torch.bfloat16)
        return cls.of(codes, ranges, bits, rotated, features, seed)

    @classmethod
    def of(cls, codes: Tensor, ranges: Tensor, bits: int, rotated: bool, features: int, seed: Seed) -> StoredRows:
        """Return the rows that these codes and ranges hold."""
        return cls(codes, ranges, bits, rotated, features, row_dither(seed, len(codes), codes.device))

    def write(self, x: Tensor, chosen: Tensor | None = None, mean: Tensor | None = None, first_column: int = 0) -> None:
        """Round x at random and store it: (rows, features).

        With ``chosen``, the indices of some rows of x, only these are stored. ``mean``, (features,), is subtracted from
        each row first. Rows are copied a slab at a time. x may be some columns of the rows, which
        begin at ``first_column``, a multiple of GROUP. A group with NaN or infinity comes back without a finite value.
        """
        dtype = compute_dtype(x.dtype)
        width = -(-x.shape[1] * 2 // 3)  # for larger slabs, since each takes many small steps
        for slab in row_slabs(len(self.codes), width, only_sizes=x.is_meta):
            rows = slab if chosen is None else chosen[slab]
            for columns, groups in parts_of(x.shape[1]):
                own = None if mean is None else mean[columns].to(dtype)
                self._write_groups(slab, _some(x[:, columns], rows, own, dtype), groups, first_column // GROUP)

    def _write_groups(self, slab: slice, values: Tensor, groups: slice, first_group: int) -> None:
        count, size = group_sizes(groups, values.shape[1])
        values = values.reshape(-1, count, size)
        groups = slice(groups.start + first_group, groups.stop + first_group)
        if self.rotated:
            values = rotate(values)
        grid = Grid.of(values, self.bits, may_keep_zeros=not self.rotated)
        codes = self._dither(slab, groups, size, values.dtype)
        if grid.zeros is None:
            own = self.rotated  # else they may be the input itself
            codes.addcmul_(values.sub_(grid.least) if own else values - grid.least, grid.inverse_step())
        else:
            codes.add_(grid.zeros).addcmul_(values - grid.least, grid.inverse_step())
            codes.masked_fill_((values == 0).logical_and_(grid.zeros), 0)
        start = groups.start * group_bytes(GROUP, self.bits)
        joined = self.codes[slab, start : start + count * group_bytes(size, self.bits)]
        out = joined.view(len(joined), count, group_bytes(size, self.bits))
        join(_whole_part(codes, self.bits), self.bits, out=out)
        self.ranges[slab, groups] = grid.stored()

    def read(self, slab: slice, dtype: torch.dtype, *, scale: float = 1.0, rotate_rows_back: bool = True) -> Tensor:
        """Return ``scale`` times some rows, which may be left rotated: (rows, features).

        At a scale of 1/2 no value overflows that was a finite one before.
        """
        parts = []
        for columns, groups in parts_of(self.features):
            values = self._read_groups(slab, columns, groups, compute_dtype(dtype), scale)
            if self.rotated and rotate_rows_back:
                values = rotate_back(values)
            parts.append(values.flatten(1).to(dtype))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, 1) if parts else self.codes.new_empty(len(self.codes[slab]), 0, dtype=dtype)

    def _read_groups(self, slab: slice, columns: slice, groups: slice, dtype: torch.dtype, scale: float) -> Tensor:
        count, size = group_sizes(groups, columns.stop - columns.start)
        start = groups.start * group_bytes(GROUP, self.bits)
        joined = self.codes[slab, start : start + count * group_bytes(size, self.bits)]
        codes = split(joined.view(len(joined), count, group_bytes(size, self.bits)), self.bits, size)
        grid = Grid.read(self.ranges[slab, groups], dtype, may_keep_zeros=not self.rotated)
        values = codes.to(dtype).sub_(self._dither(slab, groups, size, dtype))
        step = grid.step * scale
        if grid.zeros is None:
            return values.mul_(step).add_(grid.least * scale + step / 2)
        values.mul_(step).add_(grid.least * scale + step * (0.5 - grid.zeros.to(dtype)))
        return values.mul_((codes != 0).logical_or_(~grid.zeros))

    def _dither(self, slab: slice, groups: slice, size: int, dtype: torch.dtype) -> Tensor:
        """Return u for each value: (rows, groups, size)."""
        count = groups.stop - groups.start
        column = column_dither(groups.start * GROUP, count * size, self.shift.device, dtype)
        return torch.add(self.shift[slab].to(dtype), column).frac_().view(-1, count, size)


def _some(x: Tensor, rows: slice | Tensor, mean: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return some rows without the mean. They may be a view of x: do not change them."""
    some = (x[rows] if isinstance(rows, slice) else x.index_select(0, rows)).to(dtype)
    return some if mean is None else some - mean


def _whole_part(values: Tensor, bits: int) -> Tensor:
    """Drop the fractions, as ``to(torch.uint8)`` does; going by a signed type takes PyTorch half of that time."""
    if bits == 8:
        return values.to(torch.int16).to(torch.uint8)
    # What NaN became must not spill into its neighbours.
    return values.to(torch.int8).view(torch.uint8).bitwise_and_(2**bits - 1)

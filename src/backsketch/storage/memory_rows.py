"""The memory behind a tensor of any layout as rows, so that views of the same memory have the same rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .groups import GROUP

_LEAST_FOR_MEAN = 64  # rows, beside whose codes in 8 bits a mean takes at most 3%
_LEAST_ROW = 32  # values next to each other in memory; shorter rows would have more ranges than codes


@dataclass(frozen=True, slots=True)
class MemoryRows:
    """Where the values of a tensor lie: rows of ``features`` neighbours, ``row_stride`` apart.

    Dimensions are told apart by their strides alone, so a transposed view has the rows of its original, and an
    expanded one those of what was expanded.
    """

    rows: int
    features: int
    row_stride: int

    @classmethod
    def of(cls, tensor: Tensor) -> MemoryRows | None:
        """Return the rows of a tensor, or None if its values do not lie in rows."""
        merged: list[tuple[int, int]] = []  # (stride, size), outermost first
        for _, stride, size in _in_memory_order(tensor.shape, tensor.stride()):
            if merged and merged[-1][0] == stride * size:
                merged[-1] = stride, merged[-1][1] * size
            else:
                merged.append((stride, size))
        if not merged:
            return cls(1, 1, 1)
        (row_stride, rows), (stride, features) = merged if len(merged) == 2 else ((merged[0][1], 1), merged[-1])
        if len(merged) > 2 or stride != 1 or row_stride < features or (rows > 1 and features < _LEAST_ROW):
            return None
        return cls(rows, features, row_stride)

    def by_column(self, tensor: Tensor) -> MemoryRows | None:
        """Return the same memory with one row for each index of the dimension before the last, and all before it.

        In it, features that belong together are columns: those of one hidden state, or of all heads of a token. None if
        there are too few rows for a mean of them, or if rows would be shorter than a group or have gaps between them.
        """
        if tensor.dim() < 2:
            return None
        moving = _in_memory_order(tensor.shape, tensor.stride())
        place = next((place for place, (dimension, *_) in enumerate(moving) if dimension == tensor.dim() - 2), None)
        if place is None:
            return None
        features = math.prod(size for _, _, size in moving[place + 1 :])
        rows = self.rows * self.features // features
        if rows < _LEAST_FOR_MEAN or features < GROUP or (self.rows > 1 and features != self.features):
            return None
        return MemoryRows(rows, features, features if self.rows == 1 else self.row_stride)

    def view(self, tensor: Tensor) -> Tensor:
        """Return the rows of the tensor they were made of, as a view: (rows, features)."""
        return tensor.as_strided((self.rows, self.features), (self.row_stride, 1))


def in_whole_groups(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Cut a single row into rows of one group each, and what is left over: (1, values) -> (groups, GROUP), (rest,)."""
    if len(rows) > 1:
        return rows, None
    values = rows.shape[1]
    whole = values // GROUP * GROUP
    return rows[0, :whole].view(-1, GROUP), rows[0, whole:] if values % GROUP else None


def dense_view(values: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """Lay values out, without gaps, in the order in which ``strides`` had them in memory: (values,) -> shape."""
    return values.as_strided(shape, dense_strides(shape, strides))


def dense_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides without gaps in memory, in the same order.

    Dimensions of size 1 have their place in the order too: kernels read from it whether channels come last.
    """
    dense = [0] * len(shape)
    step = 1
    outermost_first = sorted(range(len(shape)), key=lambda dimension: -strides[dimension])
    for dimension in outermost_first[::-1]:
        if shape[dimension] == 1 or strides[dimension] > 0:  # others are expanded
            dense[dimension] = step
            step *= shape[dimension]
    return tuple(dense)


def _in_memory_order(shape: torch.Size, strides: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """List (dimension, stride, size) of the dimensions along which memory changes, the outermost first."""
    moving = [
        (dimension, stride, size)
        for dimension, (stride, size) in enumerate(zip(strides, shape, strict=True))
        if size > 1 and stride > 0
    ]
    return sorted(moving, key=lambda each: -each[1])

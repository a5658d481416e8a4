"""Sketches with independent entries of variance 1/dim: S is drawn slab by slab and multiplied as it comes."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from ..numerics import CHUNK_ELEMENTS, compute_dtype
from .base import BlockKind
from .draws import Draws
from .law import Law, RowBlocks

LEAST_SLAB = 256  # rows: fewer would make the GEMM read and write its output more than its input


class IidSketch(BlockKind):
    """S with independent, symmetric entries of unit variance over √dim."""

    __slots__ = ()

    kurtosis: ClassVar[int]  # κ, the fourth moment of an entry of variance 1

    @classmethod
    def law(cls, blocks: RowBlocks, dim: int) -> Law:
        """Independent entries: (P + g + (κ − 3) C) / k."""
        return Law(energy=1 / dim, coincidence=(cls.kurtosis - 3) / dim, product=1 / dim)

    @classmethod
    def noise_growth(cls, rows: int, dim: int) -> float:
        return rows / dim

    def flops(self, features: int) -> int:
        return 2 * self.rows * self.dim * features

    def helper_bytes(self, features: int) -> int:
        return 4 * self.dim * min(self.rows, max(LEAST_SLAB, CHUNK_ELEMENTS // self.dim))

    @classmethod
    @abstractmethod
    def entries(cls, count: int, draws: Draws) -> Tensor:
        """Return ``count`` independent fp32 entries of mean 0 and variance 1."""

    def compress(self, x: Tensor) -> Tensor:
        draws = self.draws(x.device)
        out = x.new_zeros(self.dim, x.shape[1], dtype=compute_dtype(x.dtype))
        height = max(LEAST_SLAB, CHUNK_ELEMENTS // self.dim)
        for start in range(0, self.rows, height):
            slab = x[start : start + height]
            matrix = self.entries(self.dim * len(slab), draws).view(self.dim, len(slab))
            out.addmm_(matrix.to(out.dtype), slab.to(out.dtype), alpha=1 / math.sqrt(self.dim))
        return out.to(x.dtype)

    @classmethod
    def draw_blocks(cls, count: int, dim: int, height: int, draws: Draws) -> Tensor:
        return cls.entries(count * dim * height, draws).view(count, dim, height)

    @classmethod
    def block_gain(cls, dim: int, height: int) -> float:
        return 1 / dim

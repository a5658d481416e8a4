"""Sketches from an orthonormal transform: random row signs, then ``dim`` of its outputs without replacement."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import lru_cache

import torch
from torch import Tensor

from ..numerics import CHUNK_ELEMENTS, column_slabs, compute_dtype
from .base import BlockKind
from .draws import Draws
from .law import Law, RowBlocks


class OrthonormalSketch(BlockKind):
    """S = √(height/dim) · D H_J: signs D, an orthonormal H, a uniform random set J of its columns."""

    __slots__ = ()

    @classmethod
    def law(cls, blocks: RowBlocks, dim: int) -> Law:
        """Signs, then k of n outputs: (n − k) / (k (n − 1)) · (P + g − 2C + what mirrored rows change)."""
        factor = (blocks.height - dim) / (dim * max(blocks.height - 1, 1))
        share = len(blocks.mirrors) / blocks.height
        return Law(factor * (1 - share / 2), factor * (share - 2), factor * (1 - share), factor)

    def flops(self, features: int) -> int:
        signs = self.rows * features
        return signs + int(2.5 * self.rows * math.log2(max(self.rows, 2))) * features  # a real FFT

    def helper_bytes(self, features: int) -> int:
        height = self.block_height(self.rows)
        return 4 * height * min(features, max(1, CHUNK_ELEMENTS // max(height, 1)))

    @property
    def gain(self) -> float:
        return self.block_gain(self.dim, self.block_height(self.rows))

    @classmethod
    @abstractmethod
    def transform(cls, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the ``chosen`` outputs of Hᵀ along the last dimension: (features, height) -> (features, dim)."""

    @classmethod
    @abstractmethod
    def matrix(cls, height: int, device: torch.device) -> Tensor:
        """Return Hᵀ itself in fp32, one output a row: (height, height)."""

    def compress(self, x: Tensor) -> Tensor:
        draws = self.draws(x.device)
        height = self.block_height(self.rows)
        dtype = compute_dtype(x.dtype)
        signs = draws.signs(self.rows).to(dtype)
        chosen = draws.choice(self.dim, height)
        out = x.new_empty(self.dim, x.shape[1])
        for slab in column_slabs(height, x.shape[1]):
            signed = x.new_zeros(slab.stop - slab.start, height, dtype=dtype)
            torch.mul(x[:, slab].t(), signs, out=signed[:, : self.rows])
            out[:, slab] = self.transform(signed, chosen).t()
        return out

    @classmethod
    def draw_blocks(cls, count: int, dim: int, height: int, draws: Draws) -> Tensor:
        signs = draws.signs(count * height).view(count, 1, height)
        order = draws.orders(count, height)
        chosen = _block_matrix(cls, height, signs.device).index_select(0, order[:, :dim].reshape(-1))
        return chosen.view(count, dim, height).mul_(signs)

    @classmethod
    def draw_bytes(cls, dim: int) -> int:
        return max(4 * dim, 8)  # a key orders each row

    @classmethod
    def block_gain(cls, dim: int, height: int) -> float:
        return height / dim


@lru_cache(maxsize=16)
def _block_matrix(kind: type[OrthonormalSketch], height: int, device: torch.device) -> Tensor:
    """Return a kind's matrix, made once: some are made on the host, and a step must not wait for that."""
    return kind.matrix(height, device)

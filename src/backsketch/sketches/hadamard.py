"""Hadamard sketch: the subsampled randomised Walsh–Hadamard transform (SORS with an orthonormal H of ±1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .orthonormal import OrthonormalSketch

RADIX = 32  # one small GEMM does five butterfly levels at once


class Hadamard(OrthonormalSketch):
    """S from the Walsh–Hadamard transform of the next power of two; the rows beyond ``rows`` are zero."""

    __slots__ = ()

    @classmethod
    def block_height(cls, rows: int) -> int:
        return 1 << max(rows - 1, 0).bit_length()

    def flops(self, features: int) -> int:
        height = self.block_height(self.rows)
        return self.rows * features + 2 * height * features * sum(_radices(height))

    @classmethod
    def transform(cls, x: Tensor, chosen: Tensor) -> Tensor:
        height, stride = x.shape[-1], 1
        for radix in _radices(height):
            x = cls.matrix(radix, x.device).to(x.dtype) @ x.reshape(-1, radix, stride)
            stride *= radix
        return x.reshape(-1, height).index_select(-1, chosen)

    @classmethod
    def matrix(cls, height: int, device: torch.device) -> Tensor:
        pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float32, device=device)
        basis = torch.ones(1, 1, dtype=torch.float32, device=device)
        while len(basis) < height:
            basis = torch.kron(pair, basis)
        return basis / math.sqrt(height)


def _radices(height: int) -> list[int]:
    """List the sizes of the small Hadamard matrices whose product is the large one."""
    radices = []
    while height > 1:
        radices.append(min(RADIX, height))
        height //= radices[-1]
    return radices

"""The contract of a sketch, and the helpers its kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..seeds import generator_at

CHUNK_ELEMENTS = 1 << 18  # 1 MiB of fp32: the largest helper matrix or column slab a sketch makes at once


@dataclass(frozen=True, slots=True)
class Sketch(ABC):
    """A random S of shape (rows, dim) with E[S Sᵀ] = I, redrawn identically from its seed on every use.

    S = √gain · R. Both passes compress with R, and the gradient is scaled by ``gain`` once, inside its GEMM:
    that saves a pass over the kept rows and is exact in half precision.
    """

    rows: int
    dim: int
    seed: int

    @property
    def gain(self) -> float | Tensor:
        """Return the factor with which E[R Rᵀ] · gain = I; a () tensor where it depends on data."""
        return 1.0

    @abstractmethod
    def compress(self, x: Tensor) -> Tensor:
        """Return Rᵀx: (rows, features) -> (dim, features)."""

    def project(self, x: Tensor) -> Tensor:
        """Return Sᵀx: (rows, features) -> (dim, features)."""
        return self.compress(x) * self.gain**0.5

    def generator(self, device: torch.device) -> torch.Generator:
        """Return a fresh generator at this sketch's seed."""
        return generator_at(self.seed, device)


class Whole(Sketch):
    """S = I: what every kind is when dim equals rows, and the gradient is exact."""

    __slots__ = ()

    def compress(self, x: Tensor) -> Tensor:
        return x


class Shapes(Sketch):
    """S on the meta device, where nothing can be drawn: the sizes of what any kind returns."""

    __slots__ = ()

    def compress(self, x: Tensor) -> Tensor:
        return x.new_empty(self.dim, x.shape[1])


class BlockKind(Sketch):
    """A kind that also has a blocked form: many small independent matrices in place of one large one."""

    __slots__ = ()

    @classmethod
    def block_height(cls, rows: int) -> int:
        """Return the height at which a block of ``rows`` rows is drawn; the rows above are taken as zero."""
        return rows

    @classmethod
    @abstractmethod
    def draw_blocks(cls, count: int, dim: int, height: int, generator: torch.Generator) -> Tensor:
        """Return ``count`` independent fp32 matrices Rᵀ, unscaled: (count, dim, height)."""

    @classmethod
    @abstractmethod
    def block_gain(cls, dim: int, height: int) -> float:
        """Return the factor with which E[R Rᵀ] · gain = I for one drawn block."""


def random_signs(count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` independent fp32 values of ±1, eight from each random byte."""
    words = torch.empty(-(-count // 64), dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    shifts = torch.arange(8, dtype=torch.uint8, device=generator.device)
    bits = words.view(torch.uint8).unsqueeze(1).bitwise_right_shift(shifts).bitwise_and_(1)
    return bits.view(-1)[:count].to(torch.float32).mul_(2).sub_(1)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which transforms and long sums run: at least fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def column_slabs(rows: int, features: int) -> Iterator[slice]:
    """Split the features so that one slab of all rows stays near CHUNK_ELEMENTS."""
    width = max(1, CHUNK_ELEMENTS // max(rows, 1))
    return (slice(start, min(start + width, features)) for start in range(0, features, width))

"""The contract of a sketch, and the helpers its kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..random_words import Seed
from .draws import Draws
from .law import NO_NOISE, Law, Mirror, RowBlocks


@dataclass(frozen=True, slots=True)
class Sketch(ABC):
    """A random S of shape (rows, dim) with E[S Sᵀ] = I, redrawn identically from its seed on every use.

    S = √gain · R. Both passes compress with R, and the gradient is scaled by ``gain`` once, inside its GEMM:
    that saves a pass over the kept rows and is exact in half precision.
    """

    rows: int
    dim: int
    seed: Seed

    mixes_rows: ClassVar[bool] = True  # a kept row is a mixture of rows, not one of them
    leaves_out_padding: ClassVar[bool] = False  # it never picks padded rows; other kinds take them as rows of zeros

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

    def among(self, valid: Tensor) -> Sketch:
        """Return the sketch to use where only ``valid`` rows count: (rows,) bool. By default others are zero in it."""
        return self

    @classmethod
    @abstractmethod
    def law(cls, blocks: RowBlocks, dim: int) -> Law:
        """Return the formula for D² of one block with ``dim`` outputs: coefficients of the moments of X and Y."""

    @classmethod
    def mirrors(cls, height: int) -> tuple[Mirror, ...]:
        """Return how the squares of a transform's entries correlate; see RowBlocks."""
        return ()

    @classmethod
    def noise_growth(cls, rows: int, dim: int) -> float:
        """Return the factor of D² that depends on the size of the sketch, for a dim below rows."""
        return rows / dim - 1

    @classmethod
    def multiple_of_sgd(cls, ratio: float) -> float | None:
        """Return D² / D²_SGD where it is the same for all data, else None."""
        return None

    @abstractmethod
    def flops(self, features: int) -> int:
        """Return the FLOPs of SᵀX for an X with ``features`` columns, to leading order; drawing S is not counted."""

    @abstractmethod
    def helper_bytes(self, features: int) -> int:
        """Return the bytes of the largest tensor that sketching makes beside its result."""

    def draws(self, device: torch.device) -> Draws:
        """Return this sketch's random numbers, from the first one on."""
        return Draws(self.seed, device)


class _Free(Sketch):
    """A sketch that adds no noise and costs nothing."""

    __slots__ = ()

    @classmethod
    def law(cls, blocks: RowBlocks, dim: int) -> Law:
        return NO_NOISE

    def flops(self, features: int) -> int:
        return 0

    def helper_bytes(self, features: int) -> int:
        return 0


class Whole(_Free):
    """S = I: what every kind is when dim equals rows, and the gradient is exact."""

    __slots__ = ()

    mixes_rows = False

    def compress(self, x: Tensor) -> Tensor:
        return x


class Shapes(_Free):
    """Any kind on the meta device, where nothing can be drawn: it returns tensors of the right shape."""

    __slots__ = ()

    def compress(self, x: Tensor) -> Tensor:
        return x.new_empty(self.dim, x.shape[1])


class BlockKind(Sketch):
    """A kind that also has a blocked form: many small independent matrices in place of one large one."""

    __slots__ = ()

    @classmethod
    def block_height(cls, rows: int) -> int:
        """Return the height at which a block of ``rows`` rows is drawn; rows that it does not have count as zero."""
        return rows

    @classmethod
    @abstractmethod
    def draw_blocks(cls, count: int, dim: int, height: int, draws: Draws) -> Tensor:
        """Return ``count`` independent fp32 matrices Rᵀ, unscaled: (count, dim, height)."""

    @classmethod
    def draw_bytes(cls, dim: int) -> int:
        """Return the bytes of the largest tensor that drawing a block takes, for each of its rows."""
        return 4 * dim

    @classmethod
    @abstractmethod
    def block_gain(cls, dim: int, height: int) -> float:
        """Return the factor with which E[R Rᵀ] · gain = I for one drawn block."""

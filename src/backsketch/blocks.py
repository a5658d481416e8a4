"""What the variance of a sketch depends on: how it splits the rows into blocks, and what it needs of X and of Y."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import SketchConfig
from .sketches import Blocked, BlockKind, Whole, make_sketch
from .sketches.base import column_slabs, compute_dtype

Mirror: TypeAlias = tuple[int, int]  # (a, c) is the permutation i -> (a·i + c) mod height of the places of a block


@dataclass(frozen=True, slots=True)
class Blocks:
    """The independent blocks of a sketch: row i is in block i mod ``count``, at place i // ``count`` of ``height``.

    A sketch that is not blocked is one block. ``mirrors`` says how the squares of a transform correlate:
    Σ_p H_ip² H_jp² = 1/n + Σ_σ ([j = σ(i)] − 1/n) / (2n) for all places i, j of n = ``height``.
    """

    kind: str
    rows: int
    dim: int
    count: int
    height: int
    mirrors: tuple[Mirror, ...]
    whole: bool

    @classmethod
    def of(cls, config: SketchConfig, rows: int) -> Blocks:
        """Return the blocks into which ``config`` splits an input of ``rows`` rows."""
        sketch = make_sketch(config.kind, rows, config.dim_for(rows), 0, config.block)
        count, height = (sketch.count, sketch.height) if isinstance(sketch, Blocked) else (1, rows)
        if isinstance(sketch, BlockKind):
            height = sketch.block_height(rows)
        whole = isinstance(sketch, Whole)
        mirrors = () if whole or config.kind not in _MIRRORS else _MIRRORS[config.kind](height)
        return cls(config.kind, rows, sketch.dim, count, height, mirrors, whole)

    def dims(self, device: torch.device) -> Tensor:
        """Return B_proj of each block: (count,); the first blocks take what does not divide."""
        dim, larger = divmod(self.dim, self.count)
        return dim + (torch.arange(self.count, device=device) < larger).to(torch.int64)

    def sum(self, values: Tensor) -> Tensor:
        """Add up within blocks: (rows,) -> (count,)."""
        return F.pad(values, (0, -self.rows % self.count)).view(-1, self.count).sum(0)

    def image(self, mirror: Mirror, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the row to which a mirror sends each row, and whether there is one: (rows,), (rows,)."""
        row = torch.arange(self.rows, device=device)
        place = torch.remainder(mirror[0] * (row // self.count) + mirror[1], self.height)
        image = place * self.count + row % self.count
        return image.clamp(max=self.rows - 1), image < self.rows


@dataclass(frozen=True, slots=True)
class Side:
    """What the laws need of X or of Y: ‖x_i‖² of each row, and ⟨x_i, x_σ(i)⟩ of each row and mirror σ."""

    norms: Tensor
    mirrored: tuple[Tensor, ...]

    @classmethod
    def of(cls, blocks: Blocks, x: Tensor) -> Side:
        """Read a side off its rows: (rows, features)."""
        norms = _wide(torch.linalg.vector_norm(x, dim=-1, dtype=compute_dtype(x.dtype))).square()
        return cls(norms, tuple(_mirrored_products(blocks, x, norms, mirror) for mirror in blocks.mirrors))


def block_products(blocks: Blocks, x: Tensor, y: Tensor) -> Tensor:
    """Return g_t = ‖X_tᵀY_t‖² exactly: (rows, in_features), (rows, out_features) -> (count,)."""
    x, y = (_split(blocks, side) for side in (x, y))
    if x.shape[1] ** 2 <= x.shape[2] * y.shape[2]:  # the Gram matrices of a short block are smaller than its gradient
        return (x @ x.mT * (y @ y.mT)).sum((1, 2))
    return (x.mT @ y).square().sum((1, 2))


def _cosine_mirrors(height: int) -> tuple[Mirror, ...]:
    return (1, 0), (-1, height - 1)


def _fourier_mirrors(height: int) -> tuple[Mirror, ...]:
    if height <= 2:
        return ()  # of this size it is the Hadamard transform
    if height % 2:
        return (1, 0), (-1, 0)
    return (1, 0), (1, height // 2), (-1, 0), (-1, height // 2)


_MIRRORS: dict[str, Callable[[int], tuple[Mirror, ...]]] = {"cosine": _cosine_mirrors, "fourier": _fourier_mirrors}


def _mirrored_products(blocks: Blocks, x: Tensor, norms: Tensor, mirror: Mirror) -> Tensor:
    if mirror == (1, 0):
        return norms
    image, exists = blocks.image(mirror, x.device)
    products = torch.zeros_like(norms)
    for slab in column_slabs(blocks.rows, x.shape[1]):
        part = x[:, slab].to(compute_dtype(x.dtype))
        products += (part * part.index_select(0, image)).sum(-1)
    return torch.where(exists, products, 0)


def _split(blocks: Blocks, x: Tensor) -> Tensor:
    """Group rows by block, shorter blocks ending in zero rows: (rows, features) -> (count, places, features)."""
    return F.pad(x, (0, 0, 0, -blocks.rows % blocks.count)).view(-1, blocks.count, x.shape[1]).transpose(0, 1)


def _wide(x: Tensor) -> Tensor:
    return x if x.device.type == "mps" else x.double()  # MPS has no fp64

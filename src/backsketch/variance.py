"""The variance that each kind of sketch adds to ∂W: closed forms, linear in the one number backward cannot see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .blocks import Blocks, Side


@dataclass(frozen=True, slots=True)
class Law:
    """D² = Σ_t (slope_t · g_t + offset_t) over blocks t, with g_t = ‖X_tᵀY_t‖²: (count,), (count,)."""

    slope: Tensor
    offset: Tensor

    def variance(self, products: Tensor) -> Tensor:
        """Return D² from g_t: (count,) -> ()."""
        return (self.slope * products + self.offset).sum()

    def product(self, observed: Tensor) -> Tensor:
        """Solve E‖Ĝ_t‖² = g_t + D²_t for g_t, so that an observed ‖Ĝ_t‖² gives an unbiased estimate of it."""
        return (observed - self.offset) / (1 + self.slope)


def law_of(blocks: Blocks, x: Side, y: Side) -> Law:
    """Return the law of the variance that this sketch adds to the gradient XᵀY."""
    if blocks.whole:
        nothing = x.norms.new_zeros(blocks.count)
        return Law(nothing, nothing)
    coincidence = blocks.sum(x.norms * y.norms)
    energy = blocks.sum(x.norms) * blocks.sum(y.norms)
    return _LAWS[blocks.kind](blocks, energy, coincidence, x, y)


def _iid(blocks: Blocks, energy: Tensor, coincidence: Tensor, x: Side, y: Side, *, kurtosis: int) -> Law:
    """Independent entries: (P + g + (κ − 3) C) / k."""
    dims = blocks.dims(energy.device)
    return Law(1 / dims, (energy + (kurtosis - 3) * coincidence) / dims)


def _orthonormal(blocks: Blocks, energy: Tensor, coincidence: Tensor, x: Side, y: Side) -> Law:
    """Signs, then k of n outputs: (P + g − 2C + what mirrored rows add) · (n − k) / (k (n − 1))."""
    dims, height = blocks.dims(energy.device), blocks.height
    factor = (height - dims) / (dims * max(height - 1, 1))
    offset = energy - 2 * coincidence
    for mirror, x_mirrored, y_mirrored in zip(blocks.mirrors, x.mirrored, y.mirrored, strict=True):
        image, exists = blocks.image(mirror, energy.device)
        fixed = image == torch.arange(blocks.rows, device=energy.device)
        across = torch.where(exists & ~fixed, x.norms * y.norms[image], 0) - torch.where(fixed, x.norms * y.norms, 0)
        offset = offset + blocks.sum(across / 2 + x_mirrored * y_mirrored) + (coincidence - energy / 2) / height
    return Law(factor * (1 - len(blocks.mirrors) / height), factor * offset)


def _rows(blocks: Blocks, energy: Tensor, coincidence: Tensor, x: Side, y: Side) -> Law:
    """Uniform rows without replacement: (B·C − g) / k · (B − k) / (B − 1), which is (1/ρ − 1) · D²_SGD."""
    rows, dim = blocks.rows, blocks.dim
    factor = (rows - dim) / (dim * (rows - 1))
    return Law(torch.full_like(energy, -factor), factor * rows * coincidence)


def _hash(blocks: Blocks, energy: Tensor, coincidence: Tensor, x: Side, y: Side) -> Law:
    """Balanced CountSketch: (P + g − 2C) · Pr(two rows share a bucket)."""
    size, larger = divmod(blocks.rows, blocks.dim)
    pairs = larger * (size + 1) * size + (blocks.dim - larger) * size * (size - 1)
    shared = pairs / (blocks.rows * (blocks.rows - 1))
    return Law(torch.full_like(energy, shared), shared * (energy - 2 * coincidence))


_LAWS: dict[str, Callable[[Blocks, Tensor, Tensor, Side, Side], Law]] = {
    "gaussian": partial(_iid, kurtosis=3),
    "rademacher": partial(_iid, kurtosis=1),
    "cosine": _orthonormal,
    "fourier": _orthonormal,
    "hadamard": _orthonormal,
    "rows": _rows,
    "hash": _hash,
}

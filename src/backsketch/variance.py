"""The variance that each kind of sketch adds to ∂W: coefficients from shapes alone, times moments of X and Y."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from .blocks import IDENTITY, Blocks, fixed_places, reflect


@dataclass(frozen=True, slots=True)
class Law:
    """D² of one block = energy · P + coincidence · C + product · g + mirrored · M; see ``moments``."""

    energy: float
    coincidence: float
    product: float
    mirrored: float = 0.0


@dataclass(frozen=True, slots=True)
class Side:
    """What the moments need of X or of Y: ‖x_i‖² of each row, and features F of it with E[F Fᵀ] = X Xᵀ, or X itself."""

    norms: Tensor
    features: Tensor


def law_of(blocks: Blocks, dim: int) -> Law:
    """Return the law of a block with ``dim`` outputs."""
    return Law(0.0, 0.0, 0.0) if blocks.whole else _LAWS[blocks.kind](blocks, dim)


def moments(blocks: Blocks, x: Side, y: Side) -> Tensor:
    """Return P = ‖X‖²‖Y‖², C = Σ_i ‖x_i‖²‖y_i‖², g = ‖XᵀY‖² and the mirrored M of each block: (4, count)."""
    x_norms, y_norms = blocks.split(x.norms), blocks.split(y.norms)
    x_rows, y_rows = blocks.split(x.features), blocks.split(y.features)
    energy = x_norms.sum(0) * y_norms.sum(0)
    coincidence = x_norms * y_norms
    mirrored = torch.zeros_like(coincidence)
    for mirror in blocks.mirrors:
        if mirror == IDENTITY:
            mirrored += coincidence / 2
            continue
        fixed = fixed_places(len(coincidence), mirror, coincidence.device).unsqueeze(1)
        agreement = _row_products(x_rows, reflect(x_rows, mirror)) * _row_products(y_rows, reflect(y_rows, mirror))
        mirrored += torch.where(fixed, coincidence / 2, x_norms * reflect(y_norms, mirror) / 2 + agreement)
    return torch.stack((energy, coincidence.sum(0), _products(x_rows, y_rows), mirrored.sum(0)))


def added_variance(blocks: Blocks, moments: Tensor) -> Tensor:
    """Return D² of the whole sketch, whose blocks are independent: (4, count) -> ()."""
    return (_coefficients(blocks, moments.device, moments.dtype) * moments).sum()


@lru_cache(maxsize=256)
def _coefficients(blocks: Blocks, device: torch.device, dtype: torch.dtype) -> Tensor:
    laws = {dim: law_of(blocks, dim) for dim in set(blocks.dims)}
    rows = [(law.energy, law.coincidence, law.product, law.mirrored) for law in (laws[dim] for dim in blocks.dims)]
    return torch.tensor(rows, device=device, dtype=dtype).t()


def _iid(blocks: Blocks, dim: int, *, kurtosis: int) -> Law:
    """Independent entries: (P + g + (κ − 3) C) / k."""
    return Law(energy=1 / dim, coincidence=(kurtosis - 3) / dim, product=1 / dim)


def _orthonormal(blocks: Blocks, dim: int) -> Law:
    """Signs, then k of n outputs: (n − k) / (k (n − 1)) · (P + g − 2C + what mirrored rows change)."""
    factor = (blocks.height - dim) / (dim * max(blocks.height - 1, 1))
    share = len(blocks.mirrors) / blocks.height
    return Law(factor * (1 - share / 2), factor * (share - 2), factor * (1 - share), factor)


def _rows(blocks: Blocks, dim: int) -> Law:
    """Uniform rows without replacement: (B·C − g) / k · (B − k) / (B − 1), which is (1/ρ − 1) · D²_SGD."""
    factor = (blocks.rows - dim) / (dim * (blocks.rows - 1))
    return Law(energy=0.0, coincidence=factor * blocks.rows, product=-factor)


def _hash(blocks: Blocks, dim: int) -> Law:
    """Balanced CountSketch: (P + g − 2C) · Pr(two rows share a bucket)."""
    size, larger = divmod(blocks.rows, dim)
    pairs = larger * (size + 1) * size + (dim - larger) * size * (size - 1)
    shared = pairs / (blocks.rows * (blocks.rows - 1))
    return Law(energy=shared, coincidence=-2 * shared, product=shared)


_LAWS: dict[str, Callable[[Blocks, int], Law]] = {
    "gaussian": partial(_iid, kurtosis=3),
    "rademacher": partial(_iid, kurtosis=1),
    "cosine": _orthonormal,
    "fourier": _orthonormal,
    "hadamard": _orthonormal,
    "rows": _rows,
    "hash": _hash,
}


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Return ‖X_tᵀY_t‖² of each block: (places, count, in_features), (places, count, out_features) -> (count,)."""
    x, y = x.transpose(0, 1), y.transpose(0, 1)
    if x.shape[1] ** 2 <= x.shape[2] * y.shape[2]:  # the Gram matrices of a short block are smaller than its gradient
        return (x @ x.mT * (y @ y.mT)).sum((1, 2))
    return (x.mT @ y).square().sum((1, 2))


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)

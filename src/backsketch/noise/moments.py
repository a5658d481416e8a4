"""The variance that a sketch adds to ∂W: moments of X and Y, times coefficients that depend on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..sketches import SKETCHES
from ..sketches.law import IDENTITY, NO_NOISE, Law, RowBlocks, fixed_places, reflect


@dataclass(frozen=True, slots=True)
class Side:
    """What the moments need of X (or Y): ‖x_i‖² of each row i, and X itself or a random F with E[F Fᵀ] = X Xᵀ."""

    norms: Tensor
    features: Tensor


def law_of(blocks: RowBlocks, dim: int) -> Law:
    """Return the law of a block with ``dim`` outputs."""
    return NO_NOISE if blocks.whole else SKETCHES[blocks.kind].law(blocks, dim)


def moments(blocks: RowBlocks, x: Side, y: Side) -> Tensor:
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


def added_variance(blocks: RowBlocks, moments: Tensor) -> Tensor:
    """Return D² of the whole sketch, whose blocks are independent: (4, count) -> ()."""
    return (_coefficients(blocks, moments.device, moments.dtype) * moments).sum()


@lru_cache(maxsize=256)
def _coefficients(blocks: RowBlocks, device: torch.device, dtype: torch.dtype) -> Tensor:
    laws = {dim: law_of(blocks, dim) for dim in set(blocks.dims)}
    rows = [(law.energy, law.coincidence, law.product, law.mirrored) for law in (laws[dim] for dim in blocks.dims)]
    return torch.tensor(rows, device=device, dtype=dtype).t()


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Return ‖X_tᵀY_t‖² of each block: (places, count, in_features), (places, count, out_features) -> (count,)."""
    x, y = x.transpose(0, 1), y.transpose(0, 1)
    if x.shape[1] ** 2 <= x.shape[2] * y.shape[2]:  # the Gram matrices of a short block are smaller than its gradient
        return (x @ x.mT * (y @ y.mT)).sum((1, 2))
    return (x.mT @ y).square().sum((1, 2))


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)

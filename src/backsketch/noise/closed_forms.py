"""The noise of a weight gradient: what the batch brings, and what a sketch adds, as exact closed forms.

``x`` is a layer's input and ``y`` = ∂L/∂X̂ the gradient of its output, (rows, features) or with any leading dimensions.
Everything is computed in fp64 and returned as a 0-d tensor. docs/mathematics.md derives each formula. With
P = ‖X‖²‖Y‖², g = ‖XᵀY‖² and C = Σ_k ‖x_k‖²‖y_k‖² (rows k), D² is the expected squared Frobenius error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import SketchConfig
from ..numerics import as_rows
from .effective_input import EffectiveInput
from .moments import Side, added_variance, moments
from .rounding import Rounding, mixes_rows
from .row_blocks import row_blocks_of

__all__ = ["alignment", "paper_bound", "paper_ratio", "paper_variance", "sgd_variance", "sketch_variance"]

_DRAWS = 64


def alignment(x: Tensor, y: Tensor) -> Tensor:
    """Return α = g / P, in [0, 1]: how far the rows' gradients agree; nan if x or y is zero."""
    x, y = _pair(x, y)
    return _product(x, y) / _energy(x, y)


def sgd_variance(x: Tensor, y: Tensor) -> Tensor:
    """Return D²_SGD = (B·C − g) / (B − 1) (Lemma 1): the noise that the exact gradient has as well."""
    x, y = _pair(x, y)
    if len(x) < 2:
        raise ValueError(f"x and y must have at least 2 rows to have a variance, got {len(x)}")
    coincidence = (x.square().sum(1) * y.square().sum(1)).sum()
    return (len(x) * coincidence - _product(x, y)) / (len(x) - 1)


def sketch_variance(x: Tensor, y: Tensor, config: SketchConfig, valid: Tensor | None = None) -> Tensor:
    """Return D² = E‖Ĝ − XᵀY‖², the noise that ``config`` adds by sketching and by storing in few bits.

    Exact for every kind, blocked or not, centred or not, and with padded rows left out (``valid``, one bool a row).
    With ``bits``, exact for ``rows`` and wherever all rows are kept; where rows are mixed first, what rounding adds has
    no closed form and is averaged over 64 sketches with fixed seeds.
    """
    x, y = _pair(x, y)
    if valid is not None:
        valid = valid.reshape(-1) != 0
        if len(valid) != len(x):
            raise ValueError(f"valid must have one value for each of the {len(x)} rows of x, got {len(valid)}")
    effective = EffectiveInput.of(x, config, valid)
    x, y, config = effective.x, effective.of_gradient(y), effective.config
    if not len(x):
        return x.new_zeros(())
    blocks = row_blocks_of(config, len(x))
    variance = added_variance(blocks, moments(blocks, *(Side(rows.square().sum(1), rows) for rows in (x, y))))
    if config.bits is None:
        return variance
    draws = [Rounding.of(x, blocks, config, seed) for seed in range(_DRAWS if mixes_rows(blocks) else 1)]
    return variance + torch.stack([draw.variance(y) for draw in draws]).mean()


def paper_variance(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """Return (P − g) / B_proj: Lemma 2 as printed. It is wrong: a Gaussian sketch adds (P + g) / B_proj."""
    x, y = _pair(x, y)
    return (_energy(x, y) - _product(x, y)) / dim


def paper_ratio(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """Return B_proj / (B − 1) · D²_RMM / D²_SGD, the left side of Theorem 1, with Lemma 2 as printed."""
    return dim / (as_rows(x).shape[0] - 1) * paper_variance(x, y, dim) / sgd_variance(x, y)


def paper_bound(x: Tensor, y: Tensor) -> Tensor:
    """Return (α + 1) / α, the right side of Theorem 1. The theorem is false: ``paper_ratio`` can exceed it."""
    share = alignment(x, y)
    return (share + 1) / share


def _pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x, y = _double(x), _double(y)
    if len(x) != len(y):
        raise ValueError(f"x and y must have the same number of rows, got {len(x)} and {len(y)}")
    return x, y


def _double(x: Tensor) -> Tensor:
    x = as_rows(x.detach())
    return (x.cpu() if x.device.type == "mps" else x).to(torch.float64)  # MPS has no fp64


def _energy(x: Tensor, y: Tensor) -> Tensor:
    return x.square().sum() * y.square().sum()


def _product(x: Tensor, y: Tensor) -> Tensor:
    return (x.t() @ y).square().sum()

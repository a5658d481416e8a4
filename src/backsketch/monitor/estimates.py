"""Estimates of the noise in one call of a layer, in backward, where X itself is gone."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .. import noise
from ..autocasting import without_autocast
from ..config import SketchConfig
from ..linear.keeping import sketch_for
from ..noise.effective_input import EffectiveInput
from ..noise.moments import Side, added_variance, law_of, moments
from ..noise.rounding import Rounding, StoredRounding
from ..noise.row_blocks import row_blocks_of
from ..numerics import compute_dtype, widest
from ..sketches import SKETCHES
from ..sketches.law import RowBlocks

QUANTITIES = ("squared_gradient", "energy", "sgd_variance", "sketch_variance", "scaled_variance")
RECORDED = (*QUANTITIES, "rounding_variance")


@dataclass(frozen=True, slots=True)
class Measured:
    """The numbers that ``quantities`` needs of one call, still on the device, each a () tensor.

    Attributes:
        observed, energy, coincidence: the square roots of ‖Ĝ‖², P and C for the whole X.
        sketched, sketched_energy, sketched_coincidence: the same for the part of X that is sketched.
        variance: D² if it was estimated from random features, else nan.
        rounding: the variance that rounding adds.
    """

    observed: Tensor
    energy: Tensor
    coincidence: Tensor
    sketched: Tensor
    sketched_energy: Tensor
    sketched_coincidence: Tensor
    variance: Tensor
    rounding: Tensor

    def stacked(self) -> Tensor:
        """Return the numbers as one tensor: (8,)."""
        return torch.stack([widest(getattr(self, each.name)) for each in fields(self)])


@dataclass(frozen=True, slots=True)
class Trace:
    """What the monitor keeps of X between the passes: row norms and, if they are not enough, a random feature a row.

    With ``center`` it also keeps the mean row, and with ``bits`` the variance of rounding each row: of rows that are
    kept as they are, it reads that off their stored ranges.
    """

    rows: int
    valid_rows: int
    norms: Tensor
    effective: EffectiveInput
    blocks: RowBlocks
    sketched_norms: Tensor
    feature: Tensor | None
    rounding: Rounding | StoredRounding | None
    generator: torch.Generator

    @classmethod
    def of(
        cls,
        x: Tensor,
        config: SketchConfig,
        generator: torch.Generator,
        valid: Tensor | None = None,
        kept: tuple[Tensor, ...] | None = None,
    ) -> Trace:
        """Compute from X, (rows, in_features), what the estimates need. A mask of padded rows is read on the host.

        ``kept`` is what the layer keeps of X, if that can be seen. It spares most of the work where rows are rounded.
        """
        norms = _row_norms(x)
        # Row norms are enough unless the mean row is kept apart, or rows themselves are read below.
        effective = EffectiveInput.of(x if config.center else norms.unsqueeze(1), config, valid)
        blocks = row_blocks_of(effective.config, len(effective.x))
        rounding: Rounding | StoredRounding | None = None
        if config.bits is not None and len(effective.x) and kept is not None and _stores_rows(config, len(x)):
            rounding = StoredRounding.of(kept[2], sketch_for(config, len(x), kept[0], valid), x)
        reads_rows = _needs_feature(blocks) or (config.bits is not None and rounding is None)
        if reads_rows and not config.center:
            effective = EffectiveInput.of(x, config, valid)
        feature = _random_feature(effective.x, generator) if _needs_feature(blocks) else None
        if config.bits is not None and rounding is None and len(effective.x):
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
            rounding = Rounding.of(effective.x, blocks, effective.config, seed)
        has_rows = reads_rows or config.center
        sketched_norms = _row_norms(effective.x) if has_rows else effective.x.squeeze(1)
        effective = replace(effective, x=x.new_empty(0, x.shape[1]))  # X itself is not kept
        counted = len(x) if valid is None else int(valid.sum())
        return cls(len(x), counted, norms, effective, blocks, sketched_norms, feature, rounding, generator)

    def measure(self, y: Tensor, grad_weight: Tensor) -> Tensor:
        """Return the numbers that ``quantities`` needs: (rows, out), (out, in) -> (8,)."""
        y_norms = _row_norms(y)
        own_norms = self.effective.of_gradient(y_norms)
        variance = torch.full_like(_norm(y_norms), math.nan)
        if self.feature is not None:
            x_side = Side(widest(self.sketched_norms).square(), self.feature)
            y_side = Side(widest(own_norms).square(), _random_feature(self.effective.of_gradient(y), self.generator))
            variance = added_variance(self.blocks, moments(self.blocks, x_side, y_side))
        return Measured(
            observed=_norm(grad_weight),
            energy=_norm(self.norms) * _norm(y_norms),
            coincidence=_norm(self.norms * y_norms),
            sketched=_norm(grad_weight if self.effective.mean is None else self._without_mean(grad_weight, y)),
            sketched_energy=_norm(self.sketched_norms) * _norm(own_norms),
            sketched_coincidence=_norm(self.sketched_norms * own_norms),
            variance=variance,
            rounding=self._rounding(y, y_norms),
        ).stacked()

    def _rounding(self, y: Tensor, y_norms: Tensor) -> Tensor:
        if isinstance(self.rounding, StoredRounding):
            return self.rounding.variance(y_norms)
        return y.new_zeros(()) if self.rounding is None else self.rounding.variance(self.effective.of_gradient(y))

    def _without_mean(self, grad_weight: Tensor, y: Tensor) -> Tensor:
        """Return the gradient without its exact part, that of the mean row."""
        dtype = compute_dtype(y.dtype)
        assert self.effective.mean is not None
        mean = self.effective.mean.to(dtype)
        return torch.addr(grad_weight.to(dtype), self.effective.of_gradient(y).sum(0, dtype=dtype), mean, alpha=-1)


@dataclass(frozen=True, slots=True)
class KeptInput:
    """X itself, kept to compute exact values instead of estimates."""

    x: Tensor
    config: SketchConfig
    valid: Tensor | None

    @property
    def rows(self) -> int:
        return len(self.x)

    @property
    def blocks(self) -> RowBlocks:
        effective = EffectiveInput.of(self.x, self.config, self.valid)
        return row_blocks_of(effective.config, len(effective.x))

    @property
    def valid_rows(self) -> int:
        return self.rows if self.valid is None else int(self.valid.sum())

    def measure(self, y: Tensor, grad_weight: Tensor) -> Tensor:
        """Return the numbers that ``quantities`` needs, with E‖Ĝ‖² in place of the observed ‖Ĝ‖²."""
        x, y = widest(self.x), widest(y)
        total = noise.sketch_variance(x, y, self.config, self.valid).to(x.device, x.dtype)
        unrounded = replace(self.config, bits=None, rotate=False)
        variance = total
        if self.config.bits is not None:
            variance = noise.sketch_variance(x, y, unrounded, self.valid).to(x.device, x.dtype)
        root = ((x.t() @ y).square().sum() + total).sqrt()
        energy, coincidence = _norm(x) * _norm(y), _norm(_row_norms(x) * _row_norms(y))
        return Measured(root, energy, coincidence, root, energy, coincidence, variance, total - variance).stacked()


def quantities(blocks: RowBlocks, rows: int, measured: list[float]) -> tuple[float, ...]:
    """Turn the numbers of ``Measured`` into unbiased estimates of RECORDED; ``rows`` includes padded rows.

    Let Ĝ be ∂W without its exact part (with ``center``, that of the mean row), and g = ‖XᵀY‖² and D² those of the part
    of X that is sketched. Then E‖Ĝ‖² = g + D². If D² is a linear function of g, solve this for g. Otherwise estimate D²
    from random features Xr and Yq, for which E(rᵀX_tᵀY_t q)² = g_t. This is needed if D² depends on g_t of each block
    or on mirrored rows, and if a single row is kept, whose Ĝ says nothing about g. Rounding adds its variance to D².
    """
    observed, energy, coincidence, sketched, sketched_energy, sketched_coincidence = (root**2 for root in measured[:6])
    variance, rounding = measured[6:]
    if math.isnan(variance):
        law = law_of(blocks, blocks.dim)
        rest = law.energy * sketched_energy + law.coincidence * sketched_coincidence
        variance = rest + law.product * (sketched - rounding - rest) / (1 + law.product)
    total = variance + rounding
    product = observed - total
    sgd = (rows * coincidence - product) / (rows - 1) if rows > 1 else math.nan
    return product, energy, sgd, total, total * blocks.dim / max(rows - 1, 1), rounding


def _stores_rows(config: SketchConfig, rows: int) -> bool:
    """Tell whether the rows that are kept are rows of X."""
    return not config.center and (not SKETCHES[config.kind].mixes_rows or config.dim_for(rows) == rows)


def _needs_feature(blocks: RowBlocks) -> bool:
    return not blocks.whole and (blocks.count > 1 or blocks.dim == 1 or bool(blocks.mirrors))


def _random_feature(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return Xr for a random normal r, so that E[Xr rᵀXᵀ] = X Xᵀ: (rows, features) -> (rows, 1)."""
    scale = 2.0 ** (x.shape[1].bit_length() // 2)  # long rows must not overflow fp16
    direction = torch.randn(x.shape[1], generator=generator, device=x.device).div_(scale).to(x.dtype)
    with without_autocast(x.device.type):
        feature: Tensor = x @ direction
    return widest(feature).mul(scale).unsqueeze(1)


def _row_norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=compute_dtype(x.dtype))
    return norms


def _norm(x: Tensor) -> Tensor:
    return widest(torch.linalg.vector_norm(x, dtype=compute_dtype(x.dtype)))

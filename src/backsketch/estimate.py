"""Estimates of the noise in one call of a layer, from what is left of X in backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import noise
from .blocks import Blocks, blocks_of
from .config import SketchConfig
from .sketches.base import compute_dtype
from .variance import Side, added_variance, law_of, moments

QUANTITIES = ("squared_gradient", "energy", "sgd_variance", "sketch_variance", "scaled_variance")


@dataclass(frozen=True, slots=True)
class Trace:
    """What is kept of X between the passes: its row norms and, where those do not do, one random feature a row."""

    blocks: Blocks
    norms: Tensor
    feature: Tensor | None
    generator: torch.Generator

    @classmethod
    def of(cls, x: Tensor, config: SketchConfig, generator: torch.Generator) -> Trace:
        """Read off X what the estimates need: (rows, in_features)."""
        blocks = blocks_of(config, len(x))
        feature = _random_feature(x, generator) if _needs_feature(blocks) else None
        return cls(blocks, _row_norms(x), feature, generator)

    def measure(self, y: Tensor, grad_weight: Tensor) -> Tensor:
        """Return the numbers ``quantities`` reads, still on the device: (rows, out), (out, in) -> (4,) or (5,)."""
        y_norms = _row_norms(y)
        norms = [_norm(grad_weight), _norm(self.norms), _norm(y_norms), _norm(self.norms * y_norms)]
        if self.feature is not None:
            x_side = Side(_wide(self.norms).square(), self.feature)
            y_side = Side(_wide(y_norms).square(), _random_feature(y, self.generator))
            norms.append(added_variance(self.blocks, moments(self.blocks, x_side, y_side)))
        return torch.stack(norms)


@dataclass(frozen=True, slots=True)
class KeptInput:
    """X itself, kept to have the exact values in place of estimates."""

    x: Tensor
    config: SketchConfig

    @property
    def blocks(self) -> Blocks:
        return blocks_of(self.config, len(self.x))

    def measure(self, y: Tensor, grad_weight: Tensor) -> Tensor:
        """Return the numbers ``quantities`` reads, with the mean of ‖Ĝ‖² in place of what the sketch drew."""
        x, y = _wide(self.x), _wide(y)
        variance = noise.sketch_variance(x, y, self.config).to(x.device, x.dtype)
        root = ((x.t() @ y).square().sum() + variance).sqrt()
        return torch.stack((root, _norm(x), _norm(y), _norm(_row_norms(x) * _row_norms(y)), variance))


def quantities(blocks: Blocks, measured: list[float]) -> tuple[float, ...]:
    """Turn ‖Ĝ‖, ‖X‖, ‖Y‖, √C and, with a random feature, D² into unbiased estimates of QUANTITIES.

    E‖Ĝ‖² = g + D². If D² is linear in g, solve for g. If it depends on more (g_t of each block, mirrored rows, or g
    when one kept row alone says nothing of it), it comes from random features Xr and Yq: E(rᵀX_tᵀY_t q)² = g_t.
    """
    observed, energy, coincidence = measured[0] ** 2, (measured[1] * measured[2]) ** 2, measured[3] ** 2
    if len(measured) == 5:
        variance = measured[4]
        product = observed - variance
    else:
        law = law_of(blocks, blocks.dim)
        rest = law.energy * energy + law.coincidence * coincidence
        product = (observed - rest) / (1 + law.product)
        variance = law.product * product + rest
    rows = blocks.rows
    sgd = (rows * coincidence - product) / (rows - 1) if rows > 1 else math.nan
    return product, energy, sgd, variance, variance * blocks.dim / max(rows - 1, 1)


def _needs_feature(blocks: Blocks) -> bool:
    return not blocks.whole and (blocks.count > 1 or blocks.dim == 1 or bool(blocks.mirrors))


def _random_feature(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return Xr for a random normal r, so that E[Xr rᵀXᵀ] = X Xᵀ: (rows, features) -> (rows, 1)."""
    scale = 2.0 ** (x.shape[1].bit_length() // 2)  # long rows must not overflow fp16
    direction = torch.randn(x.shape[1], generator=generator, device=x.device).div_(scale).to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        feature: Tensor = x @ direction
    return _wide(feature).mul(scale).unsqueeze(1)


def _row_norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=compute_dtype(x.dtype))
    return norms


def _norm(x: Tensor) -> Tensor:
    return _wide(torch.linalg.vector_norm(x, dtype=compute_dtype(x.dtype)))


def _wide(x: Tensor) -> Tensor:
    return x if x.device.type == "mps" else x.double()  # MPS has no fp64

"""How much noise a sketch would add to each weight gradient, from one backward pass of the exact model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import as_rows
from ..config import SketchConfig
from ..padding import masked_rows
from ..sketches import SKETCHES
from ..sketches.iid import IidSketch
from ..storage import rounding_variance

Bits = int | None


@dataclass(frozen=True, slots=True)
class CallNoise:
    """The noise of one call of a layer: D² = sketching · (B/k − 1) + rounding · B/k, for rounding to some bits.

    Independent entries have B/k in place of B/k − 1. Where padded rows are left out, B counts the others.
    """

    rows: int
    valid: int
    sketching: float
    rounding: Mapping[Bits, float]

    def under(self, config: SketchConfig) -> float:
        """Return D² at the size and the bits of ``config``."""
        dim = config.dim_for(self.rows)
        return self.sketching * _law(config, self.valid, dim) + self.rounding[config.bits] * max(1, self.valid / dim)


def added_noise(
    model: nn.Module,
    layers: Iterable[str],
    config: SketchConfig,
    forward: Callable[[], Tensor],
    bits: Collection[Bits] = (None,),
) -> dict[str, list[CallNoise]]:
    """Run ``model`` forward and backward and return layer -> the noise that sketches like ``config`` would add."""
    noise: dict[str, list[CallNoise]] = {name: [] for name in layers}
    with ExitStack() as stack:
        for name, calls in noise.items():
            hook = model.get_submodule(name).register_forward_hook(_listen(calls, config, bits), with_kwargs=True)
            stack.callback(hook.remove)
        forward().backward()  # type: ignore[no-untyped-call]
    return noise


def _listen(calls: list[CallNoise], config: SketchConfig, bits: Collection[Bits]) -> Callable[..., None]:
    def ran(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        x = (args[0] if args else next(iter(kwargs.values()))).detach()
        if output.requires_grad and torch.is_grad_enabled():
            valid = masked_rows(x)
            output.register_hook(lambda y: calls.append(_call_noise(as_rows(x), as_rows(y), valid, config, bits)))  # type: ignore[no-untyped-call]

    return ran


def _call_noise(x: Tensor, y: Tensor, valid: Tensor | None, config: SketchConfig, bits: Collection[Bits]) -> CallNoise:
    rows = len(x)
    if valid is not None:
        x, y = x[valid], y[valid]
    x, y = x.double(), y.double()
    if config.center and len(x):
        x = x - x.mean(0)
    count = len(x) if config.kind == "rows" else rows  # other kinds take padded rows as zeros, which cost them nothing
    sketching = 0.0
    if count > 1:
        dim = count // 2
        sketching = _variance(x, y, count, dim, config.kind) / _law(config, count, dim)
    weights = y.square().sum(1)
    rounding = {each: 0.0 if each is None else float(weights @ rounding_variance(x, each)) for each in bits}
    return CallNoise(rows, count, sketching, rounding)


def _law(config: SketchConfig, rows: int, dim: int) -> float:
    if dim >= rows:
        return 0.0
    return rows / dim if issubclass(SKETCHES[config.kind], IidSketch) else rows / dim - 1


def _variance(x: Tensor, y: Tensor, rows: int, dim: int, kind: str) -> float:
    """Return D² of a sketch of ``rows`` rows, those beyond x being zero, that keeps ``dim`` of them."""
    coincidence = (x.square().sum(1) * y.square().sum(1)).sum().item()
    product = (x.t() @ y).square().sum().item()
    if kind == "rows":
        return (rows * coincidence - product) / dim * (rows - dim) / (rows - 1)
    energy = x.square().sum().item() * y.square().sum().item()
    if kind == "gaussian":
        return (energy + product) / dim
    independent = (energy + product - 2 * coincidence) / dim
    return independent if kind == "rademacher" else independent * (rows - dim) / (rows - 1)

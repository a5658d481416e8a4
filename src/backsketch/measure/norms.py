"""How much noise a sketch would add to each weight gradient, from one backward pass of the exact model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import as_rows
from ..config import SketchConfig
from ..sketches import SKETCHES
from ..sketches.iid import IidSketch


@dataclass(frozen=True, slots=True)
class CallNoise:
    """The noise of one call of a layer: D² = constant · (B/k − 1), or constant · B/k for independent entries."""

    rows: int
    constant: float

    def under(self, config: SketchConfig) -> float:
        """Return D² at the size that ``config`` gives this call."""
        return self.constant * _law(config, self.rows, config.dim_for(self.rows))


def added_noise(
    model: nn.Module, layers: Iterable[str], config: SketchConfig, forward: Callable[[], Tensor]
) -> dict[str, list[CallNoise]]:
    """Run ``model`` forward and backward and return layer -> the noise that sketches like ``config`` would add."""
    noise: dict[str, list[CallNoise]] = {name: [] for name in layers}
    with ExitStack() as stack:
        for name, calls in noise.items():
            hook = model.get_submodule(name).register_forward_hook(_listen(calls, config), with_kwargs=True)
            stack.callback(hook.remove)
        forward().backward()  # type: ignore[no-untyped-call]
    return noise


def _listen(calls: list[CallNoise], config: SketchConfig) -> Callable[..., None]:
    def ran(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        x = as_rows((args[0] if args else next(iter(kwargs.values()))).detach())
        if output.requires_grad and torch.is_grad_enabled():
            output.register_hook(lambda y: calls.append(_call_noise(x, as_rows(y), config)))  # type: ignore[no-untyped-call]

    return ran


def _call_noise(x: Tensor, y: Tensor, config: SketchConfig) -> CallNoise:
    rows, dim = len(x), max(1, len(x) // 2)
    if rows < 2:
        return CallNoise(rows, 0.0)
    reference = replace(config, ratio=None, dim=dim, min_dim=1, max_dim=None)
    return CallNoise(rows, _variance(x, y, reference) / _law(config, rows, dim))


def _law(config: SketchConfig, rows: int, dim: int) -> float:
    if dim == rows:
        return 0.0
    return rows / dim if issubclass(SKETCHES[config.kind], IidSketch) else rows / dim - 1


def _variance(x: Tensor, y: Tensor, config: SketchConfig) -> float:
    """Return D² of a sketch that does not keep the batch whole."""
    x, y = x.double(), y.double()
    rows, dim = len(x), config.dim_for(len(x))
    coincidence = (x.square().sum(1) * y.square().sum(1)).sum().item()
    product = (x.t() @ y).square().sum().item()
    if config.kind == "rows":
        return (rows * coincidence - product) / dim * (rows - dim) / (rows - 1)
    energy = x.square().sum().item() * y.square().sum().item()
    if config.kind == "gaussian":
        return (energy + product) / dim
    independent = (energy + product - 2 * coincidence) / dim
    return independent if config.kind == "rademacher" else independent * (rows - dim) / (rows - 1)

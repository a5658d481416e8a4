"""How much noise a sketch would add to each weight gradient, from one backward pass of the exact model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import SketchConfig
from ..linear.inputs import input_of
from ..masks.scopes import masked_rows
from ..memory.training_step import backward
from ..noise.closed_forms import sketch_variance
from ..noise.rounding import rounding_variance
from ..numerics import as_rows, widest
from ..sketches import SKETCHES
from .plan_result import PlanError

Storage = tuple[int | None, bool]  # bits and rotate of a config


@dataclass(frozen=True, slots=True)
class CallNoise:
    """The noise of one call of a layer: D² = sketching · (B/k − 1) + rounding[bits] · B/k.

    For kinds with independent entries, B/k stands in place of B/k − 1. B does not count padded rows that are left out.
    """

    rows: int
    valid: int
    sketching: float
    rounding: Mapping[Storage, float]

    def under(self, config: SketchConfig) -> float:
        """Return D² at the size and the storage of ``config``."""
        dim = config.dim_for(self.rows)
        rounding = self.rounding[config.bits, config.rotate]
        return self.sketching * _growth(config, self.valid, dim) + rounding * max(1, self.valid / dim)


def added_noise(
    model: nn.Module,
    layers: Iterable[str],
    config: SketchConfig,
    forward: Callable[[], Tensor],
    storages: Collection[Storage] = ((None, False),),
) -> dict[str, list[CallNoise]]:
    """Run ``model`` forward and backward and return layer -> the noise that sketches like ``config`` would add."""
    noise: dict[str, list[CallNoise]] = {name: [] for name in layers}
    with ExitStack() as stack:
        for name, calls in noise.items():
            hook = model.get_submodule(name).register_forward_hook(_listen(calls, config, storages), with_kwargs=True)
            stack.callback(hook.remove)
        backward(forward())
    for name, calls in noise.items():
        if not all(math.isfinite(value) for call in calls for value in (call.sketching, *call.rounding.values())):
            raise PlanError(f"the batch must give finite inputs and gradients; those of layer {name} are not finite")
    return noise


def _listen(calls: list[CallNoise], config: SketchConfig, storages: Collection[Storage]) -> Callable[..., None]:
    def ran(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        x = input_of(args, kwargs).detach()
        if output.requires_grad and torch.is_grad_enabled():
            valid = masked_rows(x)
            output.register_hook(lambda y: calls.append(_call_noise(as_rows(x), as_rows(y), valid, config, storages)))  # type: ignore[no-untyped-call]

    return ran


def _call_noise(
    x: Tensor, y: Tensor, valid: Tensor | None, config: SketchConfig, storages: Collection[Storage]
) -> CallNoise:
    rows = len(x)
    x, y = widest(x), widest(y)
    if valid is not None:
        x, y = x[valid], y[valid]
    if config.center and len(x):
        x = x - x.mean(0)
    weights = y.square().sum(1)
    rounding = {
        (bits, rotate): 0.0 if bits is None else float(weights @ rounding_variance(x, bits, rotate))
        for bits, rotate in storages
    }
    if valid is not None and not SKETCHES[config.kind].leaves_out_padding:  # padded rows stay in place, as zeros
        x, y = (x.new_zeros(rows, part.shape[1]).index_put_((valid,), part) for part in (x, y))
    if len(x) < 2:
        return CallNoise(rows, len(x), 0.0, rounding)
    half = replace(config, ratio=None, dim=len(x) // 2, min_dim=1, max_dim=None, bits=None, rotate=False, center=False)
    return CallNoise(rows, len(x), float(sketch_variance(x, y, half)) / _growth(config, len(x), len(x) // 2), rounding)


def _growth(config: SketchConfig, rows: int, dim: int) -> float:
    return 0.0 if dim >= rows else SKETCHES[config.kind].noise_growth(rows, dim)

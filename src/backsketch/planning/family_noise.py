"""How much noise few bits add to the whole gradient, for each family of operations, from a few backward passes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import SketchConfig
from ..memory.training_step import backward
from ..memory.untouched_model import untouched
from ..rest.rest_config import FAMILIES, RestConfig
from .model_setting import ModelSetting
from .plan_result import PlanError
from .step_meter import StepMeter

# Bits that a plan may choose. Backward is linear in what the first two families keep, so that few bits are unbiased.
# Of the others fewer than 8 add a bias; 4 everywhere ruined a language model.
BITS: dict[str, tuple[int, ...]] = {"pointwise": (8, 4, 3, 2), "product": (8, 4, 3, 2)} | {
    family: (8,) for family in FAMILIES if family not in ("pointwise", "product")
}
PRECISE = RestConfig(**dict.fromkeys(FAMILIES, 8))  # what else there is while something is measured
_MEASURED_AT = 4  # bits, for those that may have fewer than 8
_DRAWS = 2


def family_noise(
    meter: StepMeter, families: Iterable[str], exact_layers: Mapping[str, SketchConfig]
) -> tuple[dict[str, dict[int | None, float]], float]:
    """Return family -> bits -> the expected squared error of the gradient, and the squared norm of the gradient.

    It is measured against a model that keeps everything but ``exact_layers`` in 8 bits, so that a model that does not
    fit otherwise can be measured too: the same random numbers round everything else the same way, and cancel.
    """
    names = list(families)
    errors, norm = dict.fromkeys(names, 0.0), 0.0
    for _ in range(_DRAWS):
        seed = int(torch.randint(2**31, ()))
        reference = _gradient(meter, ModelSetting(exact_layers, PRECISE), seed)
        norm += sum(_square(each) for each in reference) / _DRAWS
        for family in names:
            other = with_bits(family, _MEASURED_AT if min(BITS[family]) < 8 else None)
            found = _gradient(meter, ModelSetting(exact_layers, other), seed)
            pairs = zip(found, reference, strict=True)
            errors[family] += sum(_square(one - two) for one, two in pairs) / _DRAWS
    if not math.isfinite(norm + sum(errors.values())):
        raise PlanError("the batch must give finite gradients, also with everything in 8 bits; they are not finite")
    noise: dict[str, dict[int | None, float]] = {}
    for family, error in errors.items():
        at = _MEASURED_AT if min(BITS[family]) < 8 else 8
        noise[family] = {None: 0.0} | {bits: error * _steps(at, bits) for bits in BITS[family]}
    return noise, norm


def with_bits(family: str, bits: int | None) -> RestConfig:
    """Return the config that keeps one family in so many bits, and all others in 8."""
    changed: dict[str, Any] = {family: bits}
    return replace(PRECISE, **changed)


def _steps(measured: int, bits: int) -> float:
    """Return how much larger the variance of rounding is at ``bits``: it grows with the square of a step."""
    return float(((2**measured - 1) / (2**bits - 1)) ** 2)


def _gradient(meter: StepMeter, setting: ModelSetting, seed: int) -> list[Tensor]:
    with untouched(meter.model, (meter.args, meter.kwargs)):
        setting.put_on(meter.model)
        torch.manual_seed(seed)
        backward(meter.forward())
        return [parameter.grad for parameter in meter.model.parameters() if parameter.grad is not None]


def _square(gradient: Tensor) -> float:
    dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    return float(dense.float().square().sum(dtype=torch.float64 if dense.device.type != "mps" else None))

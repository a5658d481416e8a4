"""Slopes: the derivatives of elementwise functions, each with the range in which it lies.

Backward of y = f(x) multiplies the gradient by f′(x), and needs nothing else of x. Functions with a derivative of two
values, such as ReLU, are not here: a flag is enough for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slope:
    """The derivative of an elementwise function, and the range it lies in.

    ``at`` maps the function's input to the derivative there, in the same shape and type. ``low`` and ``high`` are
    rounded outward by more than ``at`` errs in fp32. Where the input is not finite, it may be NaN. Slopes of equal
    parameters are equal.
    """

    name: str
    low: float
    high: float
    at: Callable[[Tensor], Tensor]


def _gelu(x: Tensor) -> Tensor:
    slopes: Tensor = torch.ops.aten.gelu_backward(torch.ones_like(x), x)
    return slopes


def _gelu_tanh(x: Tensor) -> Tensor:
    near = x.clamp(-100, 100)  # its cube must not overflow; further away the derivative is 0 or 1
    slopes: Tensor = torch.ops.aten.gelu_backward(torch.ones_like(x), near, approximate="tanh")
    return slopes


def _silu(x: Tensor) -> Tensor:
    slopes: Tensor = torch.ops.aten.silu_backward(torch.ones_like(x), x)
    return slopes


def _mish(x: Tensor) -> Tensor:
    slopes: Tensor = torch.ops.aten.mish_backward(torch.ones_like(x), x)
    return slopes


def _hardswish(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, x / 3 + 0.5, (x > 0).to(x.dtype))


def _tanh(x: Tensor) -> Tensor:
    return 1 - x.tanh().square_()


def _tanhshrink(x: Tensor) -> Tensor:
    return x.tanh().square_()


def _sigmoid(x: Tensor) -> Tensor:
    y = x.sigmoid()
    return y * (1 - y)


def _log_sigmoid(x: Tensor) -> Tensor:
    return x.neg().sigmoid_()


def _softsign(x: Tensor) -> Tensor:
    return x.abs().add_(1).square_().reciprocal_()


def _erf(x: Tensor) -> Tensor:
    return x.square().neg_().exp_().mul_(2 / math.sqrt(math.pi))


def _atan(x: Tensor) -> Tensor:
    return x.square().add_(1).reciprocal_()


def _asinh(x: Tensor) -> Tensor:
    return x.square().add_(1).rsqrt_()


def _minus_sin(x: Tensor) -> Tensor:
    return x.sin().neg_()


_OUTWARD = 1e-5  # by how much of its width a range is widened at each end: more than fp32 rounds on the way there


def _between(name: str, low: float, high: float, at: Callable[[Tensor], Tensor]) -> Slope:
    margin = _OUTWARD * (high - low)
    return Slope(name, low - margin, high + margin, at)


def softplus(beta: float = 1.0, threshold: float = 20.0) -> Slope:
    """Return the slope of softplus: sigmoid(beta · x), or 1 where beta · x is above the threshold."""
    return _between("softplus", 0, 1, _Softplus(beta, threshold))


@dataclass(frozen=True, slots=True)
class _Softplus:
    beta: float
    threshold: float

    def __call__(self, x: Tensor) -> Tensor:
        scaled = x * self.beta
        return scaled.sigmoid().masked_fill_(scaled > self.threshold, 1)


def elu(alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Slope:
    """Return the slope of scale · x above zero, and of scale · alpha · (exp(input_scale · x) − 1) elsewhere."""
    if not input_scale > 0:
        raise ValueError(f"input_scale must be above 0, or the derivative has no bound, got {input_scale}")
    ends = (0.0, scale, scale * alpha * input_scale)
    return _between("elu", min(ends), max(ends), _Elu(alpha, scale, input_scale))


@dataclass(frozen=True, slots=True)
class _Elu:
    alpha: float
    scale: float
    input_scale: float

    def __call__(self, x: Tensor) -> Tensor:
        below = x.clamp(max=0).mul_(self.input_scale).exp_().mul_(self.scale * self.alpha * self.input_scale)
        return below.masked_fill_(x > 0, self.scale)


def celu(alpha: float = 1.0) -> Slope:
    """Return the slope of CELU: 1 above zero, and exp(x / alpha) elsewhere."""
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, or the derivative has no bound, got {alpha}")
    return elu(alpha=alpha, input_scale=1 / alpha)


GELU = _between("gelu", -0.12890415, 1.12890415, _gelu)
GELU_TANH = _between("gelu tanh", -0.12899307, 1.12899307, _gelu_tanh)
SILU = _between("silu", -0.09983933, 1.09983933, _silu)
MISH = _between("mish", -0.11252613, 1.08849817, _mish)
HARDSWISH = _between("hardswish", -0.5, 1.5, _hardswish)
TANH = _between("tanh", 0, 1, _tanh)
TANHSHRINK = _between("tanhshrink", 0, 1, _tanhshrink)
SIGMOID = _between("sigmoid", 0, 0.25, _sigmoid)
LOG_SIGMOID = _between("logsigmoid", 0, 1, _log_sigmoid)
SOFTSIGN = _between("softsign", 0, 1, _softsign)
ERF = _between("erf", 0, 2 / math.sqrt(math.pi), _erf)
ATAN = _between("atan", 0, 1, _atan)
ASINH = _between("asinh", 0, 1, _asinh)
SIN = _between("sin", -1, 1, torch.cos)
COS = _between("cos", -1, 1, _minus_sin)
SELU = elu(alpha=1.6732632423543772, scale=1.0507009873554805)

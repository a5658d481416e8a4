"""Activation functions: keep the derivative in few bits, in place of the input. Exactly unbiased."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..storage.slopes import Slope, times_slopes, write_slopes
from .first_derivatives import first_derivative_only
from .rules import Call, FewBits, Rule
from .saving import SavingStep


@dataclass(frozen=True, slots=True)
class Pointwise(Rule):
    """Replace a call of an activation function by one that keeps its derivative.

    ``slope_of`` takes the options of a call, and returns None for one that the rule does not cover.
    """

    slope_of: Callable[..., Slope | None]

    def __call__(self, call: Call) -> Any:
        x, bits = call.argument(0, "input"), call.step.config.pointwise
        if bits is None or not call.covers(x):
            return call.as_it_is()
        args, kwargs = call.options()
        slope = None if "out" in kwargs else self.slope_of(*args, **kwargs)
        if slope is None:
            return FewBits("other")(call)
        return call.replaced_by(_ByStoredSlope.apply, x, call.as_it_is, slope, bits, call.step)


class _ByStoredSlope(torch.autograd.Function):
    """An elementwise function whose gradient comes from its derivative, stored in few bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], Tensor], slope: Slope, bits: int, step: SavingStep) -> Tensor:
        seed = step.seed(x.device)
        codes = write_slopes(slope, x, bits, seed)
        step.tell("pointwise", x, codes)
        ctx.save_for_backward(codes)
        ctx.slope, ctx.bits, ctx.seed, ctx.dtype = slope, bits, seed, x.dtype
        return run()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (codes,) = ctx.saved_tensors
        grad = times_slopes(ctx.slope, grad_out, codes, ctx.bits, ctx.seed)
        return grad.to(ctx.dtype), None, None, None, None

"""log-softmax and cross-entropy: keep probabilities in few bits, in which backward is linear. Unbiased.

Torch keeps their logarithms, in which backward is not linear, and which are minus infinity where logits are masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .first_derivatives import first_derivative_only
from .rules import Call, Rule
from .saving import SavingStep


@dataclass(frozen=True, slots=True)
class LogSoftmax(Rule):
    """Replace a call of log_softmax by one that keeps the probabilities."""

    def __call__(self, call: Call) -> Any:
        x, dim = call.argument(0, "input"), call.argument(1, "dim")
        if call.step.config.other is None or not call.covers(x) or not isinstance(dim, int):
            return call.as_it_is()
        return call.replaced_by(_LogSoftmax.apply, x, call.as_it_is, dim, call.step)


@dataclass(frozen=True, slots=True)
class CrossEntropy(Rule):
    """Replace a call of cross_entropy with indices of classes by one that keeps the probabilities."""

    def __call__(self, call: Call) -> Any:
        given = _Arguments(*call.args, **call.kwargs)
        if call.step.config.other is None or not call.covers(given.input) or not given.are_plain:
            return call.as_it_is()
        arguments = (given.input, given.target, given.ignore_index, given.reduction, call.step)
        return call.replaced_by(_CrossEntropy.apply, *arguments)


@dataclass(slots=True)
class _Arguments:
    """The arguments of cross_entropy."""

    input: Tensor
    target: Tensor
    weight: Tensor | None = None
    size_average: bool | None = None
    ignore_index: int = -100
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @property
    def are_plain(self) -> bool:
        """Tell whether this is the usual loss: (rows, classes) and the index of a class for each row."""
        return (
            self.input.dim() == 2
            and self.target.dim() == 1
            and not self.target.is_floating_point()
            and self.weight is None
            and self.size_average is None
            and self.reduce is None
            and not self.label_smoothing
        )


class _LogSoftmax(torch.autograd.Function):
    """log_softmax whose gradient comes from probabilities in few bits: g − p · Σ g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], Tensor], dim: int, step: SavingStep) -> Tensor:
        out = run()
        packed = step.own_copy("other", out.exp(), step.config.other)
        ctx.dim, ctx.dtype, ctx.packed = dim, x.dtype, packed.held_by(())
        ctx.save_for_backward(*packed.tensors)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        probabilities = ctx.packed.held_by(ctx.saved_tensors).unpack()
        grad = torch.addcmul(grad_out, probabilities, grad_out.sum(ctx.dim, keepdim=True), value=-1)
        return grad.to(ctx.dtype), None, None, None


class _CrossEntropy(torch.autograd.Function):
    """The mean or sum of −log p over the rows whose target is not ignored; its gradient comes from p in few bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, ignore_index: int, reduction: str, step: SavingStep) -> Tensor:
        logs = F.log_softmax(x, 1)
        loss = F.nll_loss(logs, target, ignore_index=ignore_index, reduction=reduction)
        packed = step.own_copy("other", logs.exp_(), step.config.other)
        ctx.dtype, ctx.ignore_index, ctx.reduction, ctx.packed = x.dtype, ignore_index, reduction, packed.held_by(())
        ctx.save_for_backward(target, *packed.tensors)
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        target, *tensors = ctx.saved_tensors
        grad = ctx.packed.held_by(tuple(tensors)).unpack()
        counts = target != ctx.ignore_index
        index = target.masked_fill(~counts, 0).long().unsqueeze(1)  # a target may also be of bytes
        grad.scatter_add_(1, index, grad.new_full((), -1).expand(index.shape))
        scale = counts.to(grad.dtype)
        if ctx.reduction == "mean":  # zeros, as torch has them, if all are ignored
            scale = scale / counts.sum().clamp_(min=1)
        scale = (scale * grad_out).masked_fill_(~counts, 0)
        return grad.mul_(scale.unsqueeze(1)).to(ctx.dtype), None, None, None, None

"""linear_cross_entropy: the cross-entropy of a linear layer's output, which never stands whole in memory.

Forward makes the logits of some rows at a time and keeps one number a row of them, the logarithm of their summed
exponentials. Backward makes them again, a tile at a time, and turns each tile into its gradient. Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..argument_checks import check_positive, is_integer
from ..autocasting import autocast_on
from ..numerics import as_rows, compute_dtype
from ..torch_private import transforms_active
from .logit_curve import LogitCurve

_ROWS = 256  # fewer leave a matrix product slow
_STRAIGHT = LogitCurve()
_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Return F.cross_entropy(F.linear(hidden, weight, bias), target), without logits of all rows at once.

    Loss and gradients are exact. Kept for backward are ``hidden``, as it is, and one number a row. The softmax is
    computed in fp32 (fp64 for fp64), in which the loss is too, and under autocast the logits in its type. Call it
    outside of ``torch.compile``: compiled code is right too, but may keep logits that backward would make again.

    Args:
        hidden: (..., features), as a model's last hidden state.
        weight: (classes, features), that of the head; it may be tied to an embedding, and may be frozen.
        target: (...), the index of a class for each row.
        bias: (classes,).
        ignore_index: rows with this target count for nothing.
        reduction: "mean" over the rows that count, "sum", or "none".
        chunk: of how many rows logits exist at a time. By default of a quarter of all and of at most 256, or of as
            many as have no more logits than ``hidden`` has values.
    """
    _check(hidden, weight, target, bias, reduction)
    if not is_integer(ignore_index):
        raise TypeError(f"ignore_index must be an integer, got {ignore_index!r}")
    if chunk is not None:
        check_positive("chunk", chunk)
    arguments = hidden, weight, target.reshape(-1), bias, ignore_index, reduction, chunk, _STRAIGHT
    loss: Tensor = curved_cross_entropy(*arguments)
    return loss.view(target.shape) if reduction == "none" else loss


def curved_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    chunk: int | None,
    curve: LogitCurve,
) -> Tensor:
    """Return the loss for logits on which a model runs ``curve`` first; ``target`` has one dimension."""
    if transforms_active():
        raise RuntimeError(_TRANSFORMED)
    rows = as_rows(hidden)
    classes, features = weight.shape
    least = min(_ROWS, ceil(len(rows) / 4))
    chunk = max(1, least, len(rows) * features // max(classes, 1)) if chunk is None else chunk
    options = _Options(product_dtype(hidden), ignore_index, reduction, chunk, curve)
    loss: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, target.long(), options)  # type: ignore[no-untyped-call]
    return loss


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the type in which F.linear multiplies ``hidden`` now."""
    return torch.get_autocast_dtype(hidden.device.type) if is_autocast(hidden) else hidden.dtype


def is_autocast(tensor: Tensor) -> bool:
    """Tell whether autocast chooses the type in which functions of ``tensor`` are computed now."""
    return autocast_on(tensor.device.type) and tensor.dtype != torch.float64


@dataclass(frozen=True, slots=True)
class _Options:
    """How to compute the loss: ``dtype`` is that of the products."""

    dtype: torch.dtype
    ignore_index: int
    reduction: str
    chunk: int
    curve: LogitCurve

    @property
    def wide(self) -> torch.dtype:
        return compute_dtype(self.dtype)

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of some rows for some classes: (rows, features), (classes, features) -> (rows, classes)."""
        logits = F.linear(x.to(self.dtype), weight.to(self.dtype), None if bias is None else bias.to(self.dtype))
        return self.curve.apply_(logits.to(self.wide))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: _Options) -> Tensor:
        losses = x.new_empty(len(x), dtype=options.wide)
        sums = torch.empty_like(losses)
        cast = weight.to(options.dtype)  # once for all chunks
        for part in _slices(len(x), options.chunk):
            logits = options.logits(x[part], cast, bias)
            counts = target[part] != options.ignore_index
            of_target = F.nll_loss(logits, target[part], ignore_index=options.ignore_index, reduction="none")
            highest = logits.amax(1, keepdim=True)
            sums[part] = logits.sub_(highest).exp_().sum(1).log_().add_(highest.squeeze(1))
            losses[part] = (sums[part] + of_target).masked_fill_(~counts, 0)
        ctx.options = options
        ctx.save_for_backward(x, weight, bias, target, sums)
        if options.reduction == "none":
            return losses
        total = losses.sum()
        return total if options.reduction == "sum" else total / (target != options.ignore_index).sum()

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(_TWICE)
        x, weight, bias, target, sums = ctx.saved_tensors
        options: _Options = ctx.options
        counts = target != options.ignore_index
        scale = grad_out.to(options.wide).expand(len(x))
        if options.reduction == "mean":  # zeros, as torch has them, if no row counts
            scale = scale / counts.sum().clamp_(min=1)
        scale = scale.masked_fill(~counts, 0)
        gradients = _Gradients(ctx.needs_input_grad, x, weight, bias, over_classes=len(weight) >= len(x))
        for rows, classes in _tiles(len(x), len(weight), options.chunk):
            own_bias = None if bias is None else bias[classes]
            logits = options.logits(x[rows], weight[classes], own_bias)
            slope = options.curve.slope(logits)
            grad = logits.sub_(sums[rows].unsqueeze(1)).exp_()
            _subtract_target(grad, target[rows], classes)
            grad.mul_(scale[rows].unsqueeze(1)).mul_(slope)
            gradients.add(rows, classes, grad, options.dtype)
            del logits, grad, slope  # before the next tile is made
        return gradients.x, gradients.weight, gradients.bias, None, None


def _subtract_target(probabilities: Tensor, target: Tensor, classes: slice) -> None:
    """Subtract 1 where a row's target is, if it is one of these classes."""
    place = target - classes.start
    inside = (place >= 0) & (place < probabilities.shape[1])
    place = place.clamp_(0, probabilities.shape[1] - 1)
    probabilities.scatter_add_(1, place.unsqueeze(1), inside.to(probabilities.dtype).neg_().unsqueeze(1))


class _Gradients:
    """The gradients as they grow. Tiles go along classes or along rows: what all of them add to is summed in fp32."""

    def __init__(
        self, needed: tuple[bool, ...], x: Tensor, weight: Tensor, bias: Tensor | None, *, over_classes: bool
    ) -> None:
        self._x, self._weight = x, weight
        self._over_classes = over_classes
        self._types = x.dtype, weight.dtype, None if bias is None else bias.dtype
        wide = compute_dtype(x.dtype)
        self._grad_x = torch.zeros_like(x, dtype=wide if over_classes else x.dtype) if needed[0] else None
        self._grad_weight = (
            torch.zeros_like(weight, dtype=weight.dtype if over_classes else wide) if needed[1] else None
        )
        self._grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None

    def add(self, rows: slice, classes: slice, grad: Tensor, dtype: torch.dtype) -> None:
        """Add what a tile gives, of which ``grad`` is the gradient of the logits."""
        if self._grad_bias is not None:
            self._grad_bias[classes] += grad.sum(0)
        grad = grad.to(dtype)
        if self._grad_x is not None:
            _add_product(self._grad_x[rows], grad, self._weight[classes].to(dtype))
        if self._grad_weight is not None:
            _add_product(self._grad_weight[classes], grad.T, self._x[rows].to(dtype))

    @property
    def x(self) -> Tensor | None:
        return None if self._grad_x is None else self._grad_x.to(self._types[0])

    @property
    def weight(self) -> Tensor | None:
        return None if self._grad_weight is None else self._grad_weight.to(self._types[1])

    @property
    def bias(self) -> Tensor | None:
        return None if self._grad_bias is None else self._grad_bias.to(self._types[2])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _tiles(rows: int, classes: int, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Split the logits into tiles of ``chunk`` × ``classes`` values, along the longer side.

    All tiles add to the gradient of the shorter one, which then costs less to read and write again for each.
    """
    if classes >= rows:
        width = max(1, chunk * classes // max(rows, 1))
        return ((slice(0, rows), part) for part in _slices(classes, width))
    return ((part, slice(0, classes)) for part in _slices(rows, chunk))


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _check(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str) -> None:
    """Raise ValueError or TypeError for arguments that do not fit each other."""
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, _REDUCTIONS))}, got {reduction!r}")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight must have the shape (classes, features) for hidden of {tuple(hidden.shape)}, got "
            f"{tuple(weight.shape)}"
        )
    if target.is_floating_point() or target.dtype == torch.bool:
        raise TypeError(f"target must hold indices of classes, got {target.dtype}")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target must have the shape {tuple(hidden.shape[:-1])}, one class a row of hidden, got "
            f"{tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have the shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")


_TRANSFORMED = (
    "a fused loss cannot run inside a transform of torch.func: call backsketch.unfuse_loss_(model), or use "
    "F.cross_entropy on logits"
)
_TWICE = (
    "a fused loss cannot be differentiated twice (create_graph=True): call backsketch.unfuse_loss_(model), or use "
    "F.cross_entropy on logits"
)

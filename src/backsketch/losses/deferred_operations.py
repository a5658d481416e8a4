"""What functions of torch do to deferred logits: those that models call between their head and their loss."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_private import as_plain_tensors
from .deferred_logits import HANDLERS, DeferredLogits, Handler, View, deferred
from .linear_cross_entropy import curved_cross_entropy, is_autocast


def _cast(dtype: torch.dtype | None) -> Handler:
    def cast(function: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        wanted = dtype if dtype is not None else args[0] if len(args) == 1 and not kwargs else kwargs.get("dtype")
        keeps = isinstance(wanted, torch.dtype) and len(args) + len(kwargs) == (dtype is None)
        if not keeps or wanted not in (torch.float32, logits.dtype) or logits.dtype == torch.float64:
            return NotImplemented  # in fewer digits than the products have
        return logits if wanted == logits.dtype else deferred(logits.parts, wanted)

    return cast


def _same(function: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else logits


def _shaped(function: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if not all(isinstance(size, (int, tuple, list)) for size in (*args, *kwargs.values())):
        return NotImplemented
    parts = logits.parts
    with as_plain_tensors():
        shape = function(logits, *args, **kwargs).shape
    if shape[-1:] != logits.shape[-1:]:
        return NotImplemented
    hidden = parts.hidden.reshape(*shape[:-1], parts.hidden.shape[-1])
    return deferred(replace(parts, hidden=hidden), logits.dtype, View(logits, function, args, kwargs))


def _cut(function: Any, logits: DeferredLogits, index: Any) -> Any:
    """Take slices of all dimensions but the last."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(entry, slice) or entry is Ellipsis for entry in entries):
        return NotImplemented
    given = [entry for entry in entries if entry is not Ellipsis]
    place = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    full = [*given[:place], *[slice(None)] * (logits.dim() - len(given)), *given[place:]]
    if len(full) != logits.dim() or full[-1].indices(logits.shape[-1]) != (0, logits.shape[-1], 1):
        return NotImplemented
    parts = logits.parts
    whole: tuple[slice, ...] = (*full[:-1], slice(None))
    return deferred(replace(parts, hidden=parts.hidden[whole]), logits.dtype, View(logits, function, (index,), {}))


def _scaled(inverse: bool) -> Handler:
    def scale(function: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        factor = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(factor, bool) or not isinstance(factor, Real) or (inverse and not factor):
            return NotImplemented
        number = 1 / float(factor) if inverse else float(factor)
        return deferred(replace(logits.parts, curve=logits.parts.curve.scaled(number)), logits.dtype)

    return scale


def _bent(function: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    curve = logits.parts.curve.bent()
    return (
        NotImplemented
        if curve is None or args or kwargs
        else deferred(replace(logits.parts, curve=curve), logits.dtype)
    )


def _biased(function: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Add one number a class, as BART does."""
    parts = logits.parts
    classes = logits.shape[-1]
    other: Any = args[0] if len(args) == 1 and not kwargs else None
    fits = isinstance(other, Tensor) and other.numel() == classes == other.shape[-1] and other.dim() <= logits.dim()
    if not fits or isinstance(other, DeferredLogits) or not parts.curve.is_straight:
        return NotImplemented
    bias = other.reshape(-1) if parts.bias is None else parts.bias + other.reshape(-1)
    return deferred(replace(parts, bias=bias), torch.promote_types(logits.dtype, other.dtype))


def _cross_entropy(
    function: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    others = (weight, size_average, reduce)
    if not isinstance(input, DeferredLogits) or any(each is not None for each in others) or label_smoothing:
        return NotImplemented
    if input.dim() != 2 or target.shape != input.shape[:1] or target.is_floating_point():
        return NotImplemented
    parts = input.parts
    loss = curved_cross_entropy(
        parts.hidden, parts.weight, target, parts.bias, ignore_index, reduction, parts.call.chunk, parts.curve
    )
    parts.call.fused = True
    return loss if is_autocast(input) else loss.to(input.dtype)  # autocast runs cross-entropy in fp32


_BY_HANDLER: tuple[tuple[Handler, tuple[Any, ...]], ...] = (
    (_cast(torch.float32), (Tensor.float,)),
    (_cast(None), (Tensor.to,)),
    (_same, (Tensor.contiguous,)),
    (_shaped, (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten)),
    (_cut, (Tensor.__getitem__,)),
    (_scaled(inverse=False), (Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__)),
    (_scaled(inverse=True), (Tensor.div, torch.div, Tensor.__truediv__)),
    (_bent, (Tensor.tanh, torch.tanh, F.tanh)),
    (_biased, (Tensor.add, torch.add, Tensor.__add__, Tensor.__radd__)),
    (_cross_entropy, (F.cross_entropy,)),
)
HANDLERS.update({function: handler for handler, functions in _BY_HANDLER for function in functions})

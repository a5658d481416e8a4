"""DeferredLogits: logits that are not computed until somebody needs them, which a fused loss does not.

A head returns them in place of logits while a model with a fused loss runs forward. What models do to logits before
the loss (casting, cutting off the last position, flattening, scaling, capping) is noted. Cross-entropy of them is
``linear_cross_entropy``. Anything else computes the logits as they always were, and says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autocasting import without_autocast
from ..torch_private import as_plain_tensors, tree_map_only
from .linear_cross_entropy import product_dtype
from .logit_curve import LogitCurve

Handler: TypeAlias = Callable[..., Any]


@dataclass(slots=True, eq=False)
class HeadCall:
    """One call of a head, the type of its products, and whether a fused loss was made of it."""

    chunk: int | None
    dtype: torch.dtype
    fused: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What logits are made of: hidden states (..., features), the head's weight and bias, and a curve."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    call: HeadCall
    curve: LogitCurve = field(default_factory=LogitCurve)

    def logits(self) -> Tensor:
        """Compute the logits as the head would have, also where autocast is off by now."""
        hidden, weight = self.hidden.to(self.call.dtype), self.weight.to(self.call.dtype)
        bias = None if self.bias is None else self.bias.to(self.call.dtype)
        with without_autocast(self.hidden.device.type):
            logits = F.linear(hidden, weight, bias)
        if self.curve.bends:
            logits = torch.tanh(logits * self.curve.before)
        return logits if self.curve.after == 1.0 else logits * self.curve.after


class DeferredLogits(Tensor):
    """A tensor with the shape, type and device of logits, and no values: it holds one NaN.

    Code of C++ that reads it all the same gets NaN, and backward through it raises.
    """

    parts: Parts
    _computed: Tensor | None
    _view: View | None

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int | None) -> DeferredLogits:
        """Return what stands for F.linear(hidden, weight, bias)."""
        dtype = product_dtype(hidden)
        return deferred(Parts(hidden, weight, bias, HeadCall(chunk, dtype)), dtype)

    @property
    def call(self) -> HeadCall:
        """Return the call of the head that these logits come from."""
        return self.parts.call

    @property
    def is_computed(self) -> bool:
        """Tell whether the logits exist by now, here or in what this is a view of."""
        return self._computed is not None or (self._view is not None and self._view.base.is_computed)

    def compute(self) -> Tensor:
        """Compute the logits, once, with the graph that they would have: who reads them first may need none."""
        if self._computed is None:
            with torch.inference_mode(False), torch.enable_grad(), as_plain_tensors():
                self._computed = (
                    self.parts.logits().to(self.dtype).view(self.shape) if self._view is None else self._view.take()
                )
        return self._computed

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        first = args[0] if args else None
        if isinstance(first, DeferredLogits) and not first.is_computed:
            if function in _FACTS:
                with as_plain_tensors():
                    return function(*args, **kwargs)
            result = NotImplemented
            if torch.is_grad_enabled() and (handler := HANDLERS.get(function)) is not None:
                result = handler(function, *args, **kwargs)
            if result is not NotImplemented:
                return result
            _warn(function)
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.compute, (args, kwargs))
        with as_plain_tensors():
            return function(*args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """How deferred logits were taken from others. What changes the one in place then changes the other too."""

    base: DeferredLogits
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def take(self) -> Tensor:
        """Take the view of the computed logits."""
        return self.function(self.base.compute(), *self.args, **self.kwargs)


def deferred(parts: Parts, dtype: torch.dtype, view: View | None = None) -> DeferredLogits:
    """Return what stands for the logits that ``parts`` make, in a type; ``view`` if they share memory with others."""
    shape = (*parts.hidden.shape[:-1], len(parts.weight))
    stand_in: Tensor = _NoValues.apply(parts.hidden, parts.weight, parts.bias, shape, dtype)  # type: ignore[no-untyped-call]
    logits = stand_in.as_subclass(DeferredLogits)
    logits.parts, logits._computed, logits._view = parts, None, view
    return logits


class _NoValues(torch.autograd.Function):
    """One NaN for all logits, and an error for whoever differentiates through it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        return hidden.new_full((), torch.nan, dtype=dtype).expand(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(_NOT_COMPUTED)


# What can be told without values.
_FACTS: frozenset[Any] = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.__hash__),
        *(Tensor.is_floating_point, Tensor.is_complex),
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested")),
    )
)

# Function of torch -> what it does to deferred logits; deferred_operations.py fills it. It takes the function and its
# arguments, and returns NotImplemented for what needs the logits themselves.
HANDLERS: dict[Any, Handler] = {}


def _warn(function: Any) -> None:
    name = getattr(function, "__qualname__", None) or repr(function)
    warnings.warn(f"{name} reads the logits of a model with a fused loss: {_COMPUTED}", stacklevel=3)


_COMPUTED = "they are computed for it, and kept as without fuse_loss_"
_NOT_COMPUTED = (
    "the logits of a model with a fused loss were not computed, and something other than a function of torch used "
    "them: call backsketch.unfuse_loss_(model)"
)

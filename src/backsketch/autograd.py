"""sketched_linear: Algorithm 1 of the paper."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .config import SketchConfig
from .seeds import draw_seed
from .sketches import Sketch, make_sketch


def sketched_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, config: SketchConfig | None = None
) -> Tensor:
    """Return x Wᵀ + b as F.linear does, and keep a sketch of x for ∂W in place of x itself.

    The output, ∂x and ∂b are those of F.linear; ∂W is unbiased. Where ∂W is not asked for, this is F.linear.

    Args:
        x: (..., in_features); weight: (out_features, in_features); bias: (out_features,).
        config: what to keep; ``SketchConfig.recommended()`` by default.
    """
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return F.linear(x, weight, bias)
    config = SketchConfig.recommended() if config is None else config
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return _run(x, weight, bias, config)
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return _run(x.to(dtype), weight, bias, config, dtype)


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: SketchConfig, cast: torch.dtype | None = None
) -> Tensor:
    kept, seed = keep(as_rows(x.detach()), config)
    out: Tensor = _SketchedLinear.apply(x, weight, bias, kept, seed, config, cast)  # type: ignore[no-untyped-call]
    return out


def keep(x: Tensor, config: SketchConfig) -> tuple[Tensor, Tensor]:
    """Draw a seed and return the kept rows of x with it: (rows, in_features) -> (dim, in_features), ()."""
    seed = draw_seed()
    return sketch_for(config, len(x), seed).compress(x), seed


def sketch_for(config: SketchConfig, rows: int, seed: Tensor) -> Sketch:
    """Return the sketch that both passes of one call use."""
    return make_sketch(config.kind, rows, config.dim_for(rows), int(seed), config.block)


def as_rows(x: Tensor) -> Tensor:
    """Flatten all leading dimensions: (..., features) -> (rows, features)."""
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(x.shape[:-1].numel(), 0)


class _SketchedLinear(torch.autograd.Function):
    """F.linear whose weight gradient comes from the kept rows: ∂W = (SᵀY)ᵀ(SᵀX)."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept: Tensor,
        seed: Tensor,
        config: SketchConfig,
        cast: torch.dtype | None,
    ) -> Tensor:
        if cast is not None:  # not by autocast, whose cache would hand this detached copy to other users of the weight
            weight, bias = weight.to(cast), None if bias is None else bias.to(cast)
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, weight, bias, kept, seed, config, _ = inputs
        # The seed is a saved tensor like the rows: checkpointing then recomputes, hooks and offload move, both or none.
        ctx.save_for_backward(weight, kept, seed)
        ctx.config = config
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return (None,) * 7
        weight, kept, seed = ctx.saved_tensors
        y = as_rows(grad_out)
        grad_x = grad_weight = grad_bias = None
        with _without_autocast(grad_out.device.type):
            if ctx.needs_input_grad[0]:
                grad_x = grad_out @ weight.to(grad_out.dtype)
            if ctx.needs_input_grad[1]:
                sketch = sketch_for(ctx.config, len(y), seed)
                grad_weight = _scaled_product(sketch.compress(y), kept, sketch.gain).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                grad_bias = y.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _scaled_product(y: Tensor, x: Tensor, gain: float) -> Tensor:
    """Return gain · yᵀx: (dim, out_features), (dim, in_features) -> (out_features, in_features)."""
    if gain == 1:
        return y.t() @ x
    return y.new_empty(y.shape[1], x.shape[1]).addmm_(y.t(), x, beta=0, alpha=gain)


def _without_autocast(device: str) -> AbstractContextManager[object]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()

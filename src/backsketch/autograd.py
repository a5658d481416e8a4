"""sketched_linear: Algorithm 1 of the paper."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import SketchConfig, check_config
from .inputs import as_rows, autocast_to, check_inputs
from .kept import keep, weight_gradient
from .ops import traced_keep, traced_weight_gradient
from .padding import check_promise, valid_for
from .seeds import draw_seed
from .sharing import shared
from .transforms import check_backward, check_forward

_DEFAULT = SketchConfig.recommended()  # made here, as a graph cannot make one


def sketched_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, config: SketchConfig | None = None
) -> Tensor:
    """Return x Wᵀ + b as F.linear does, and keep a sketch of x for ∂W in place of x itself.

    The output, ∂x and ∂b are those of F.linear; ∂W is unbiased. Where ∂W is not asked for, this is F.linear.

    Args:
        x: (..., in_features); weight: (out_features, in_features); bias: (out_features,).
        config: what to keep; ``SketchConfig.recommended()`` by default.
    """
    if torch._C._are_functorch_transforms_active():
        check_forward(weight)
        if not weight.requires_grad:
            return F.linear(x, weight, bias)
    # Drawn also where it is not needed: reentrant checkpointing runs under no_grad first, where even the weight may
    # seem not to be trained, and must then draw as many random numbers as when it runs again.
    seed = None if torch.compiler.is_compiling() else draw_seed()
    if not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if not weight.requires_grad:
        return F.linear(x, weight, bias)
    check_inputs(x, weight)
    config = _DEFAULT if config is None else check_config(config)
    if seed is None and config.keeps_all:  # an operator would have to copy x to keep it
        return F.linear(x, weight, bias)
    device = x.device.type
    if not _autocast_on(device):
        return _run(x, weight, bias, config, seed, None)
    with torch.autocast(device, enabled=False):
        return _run(x, weight, bias, config, seed, torch.get_autocast_dtype(device))


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: SketchConfig, seed: Tensor | None, cast: torch.dtype | None
) -> Tensor:
    source, x = x, autocast_to(x, cast)
    how: SketchConfig | str = config
    if seed is None:  # compiling: the operator draws it, and the compiler shares
        how = config.spelled
        valid, kept = None, traced_keep(as_rows(x.detach()), how)
    else:
        valid = valid_for(x, seed)
        kept = shared(source, (config, cast, id(valid)), lambda: keep(as_rows(x.detach()), config, seed, valid))
    function = _TransformedLinear if torch._C._are_functorch_transforms_active() else _SketchedLinear
    out: Tensor = function.apply(x, weight, bias, how, cast, valid, *kept)  # type: ignore[no-untyped-call]
    return out


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: SketchConfig | str,
    cast: torch.dtype | None,
    valid: Tensor | None,
    *kept: Tensor,
) -> Tensor:
    # Not by autocast itself, whose cache would hand this detached copy to other users of the weight.
    return F.linear(x, autocast_to(weight, cast), None if bias is None else autocast_to(bias, cast))


def _remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
    x, weight, bias, how, _, valid, *kept = inputs
    # The seed and the mask are saved tensors like the rows: checkpointing recomputes all of them, or none.
    ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, valid, *kept)
    ctx.valid = valid  # and once more outside, for valid_for to find while checkpointing recomputes
    ctx.how = how  # the config, or its spelling where a graph was traced
    ctx.in_features, ctx.weight_dtype = weight.shape[1], weight.dtype
    ctx.column_major = x.dim() == 2 and x.stride(0) == 1 and x.stride(1) == x.shape[0]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


class _SketchedLinear(torch.autograd.Function):
    """F.linear whose weight gradient comes from what was kept of x: ∂W = (SᵀY)ᵀ(SᵀX)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _remember(ctx, inputs)
        return _forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
        # To refuse a second derivative takes as long as a small GEMM, and only create_graph=True can ask for one.
        return _backward_once(ctx, grad_out) if torch.is_grad_enabled() else _backward(ctx, grad_out)


class _TransformedLinear(_SketchedLinear):
    """The same in the form that torch.func asks for, which takes PyTorch several times as long to call."""

    forward = staticmethod(_forward)  # type: ignore[assignment]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _remember(ctx, inputs)


def _backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch._C._are_functorch_transforms_active():
        check_backward()
    if grad_out is None:
        return (None,) * len(ctx.needs_input_grad)
    device = grad_out.device.type
    if not _autocast_on(device):
        return _gradients(ctx, grad_out)
    with torch.autocast(device, enabled=False):
        return _gradients(ctx, grad_out)


def _backward_once(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients such that to differentiate them again is an error."""
    with torch.no_grad():
        found = _backward(ctx, grad_out)
    if grad_out is None or not grad_out.requires_grad:
        return found
    outputs: list[Any] = [None if each is None else each.detach() for each in found]
    for each in outputs:
        if each is not None:
            each.requires_grad = True
    refused: tuple[Tensor | None, ...] = torch._C._functions.DelayedError(_TWICE, len(outputs))(*outputs)
    return refused


_TWICE = (
    "a sketched layer cannot be differentiated twice: its weight gradient is an estimate from what is kept. For a "
    "gradient penalty or a Hessian use exact layers: backsketch.unsketch_(model)"
)


def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    weight, valid, *kept = ctx.saved_tensors
    y = as_rows(grad_out)
    grad_x = grad_weight = grad_bias = None
    if valid is not None:
        check_promise(valid, y)
    if ctx.needs_input_grad[1]:  # first, so that the compressed Y is gone before ∂x is there
        estimate = traced_weight_gradient if torch.compiler.is_compiling() else weight_gradient
        grad_weight = estimate(tuple(kept), y, ctx.how, ctx.in_features, valid).to(ctx.weight_dtype)
    if ctx.needs_input_grad[0]:
        weight = weight.to(grad_out.dtype)
        # Autograd gives a column-major x a column-major gradient; the other product may round otherwise.
        grad_x = (weight.t() @ grad_out.t()).t() if ctx.column_major else grad_out @ weight
    if ctx.needs_input_grad[2]:
        grad_bias = y.sum(0).to(ctx.bias_dtype)
    return grad_x, grad_weight, grad_bias, None, None, None, *(None for _ in kept)


def _autocast_on(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)  # meta has no autocast, and asking is an error

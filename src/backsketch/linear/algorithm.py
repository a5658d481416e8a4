"""sketched_linear: Algorithm 1 of the paper."""

from __future__ import annotations

from typing import Any, TypeAlias
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autocasting import autocast_on
from ..config import SketchConfig, check_config
from ..masks.promise import check_promise
from ..numerics import as_rows
from ..seeds import draw_seed
from ..storage.packed_copies import packed_copy
from ..storage.packed_tensor import PackedTensor
from ..torch_private import is_exporting, is_fake, is_tracing, memory_id, not_a_view, transforms_active
from .checkpointing import inside_checkpoint, warn_of_checkpoint
from .compiled_operators import opaque_keep, traced_keep, traced_weight_gradient
from .func_transforms import check_backward, check_forward
from .held_inputs import held_by_producer, saved_by_producer
from .inputs import autocast_to, check_inputs
from .sharing import keep_or_share
from .weight_gradient import weight_gradient

# How x is kept: by a sketch (its JSON in a compiled graph), as it is, or by a packed copy that another operation keeps.
How: TypeAlias = SketchConfig | str | PackedTensor | None

# Made here, because a compiled graph cannot make one.
_DEFAULTS = {d.itemsize: SketchConfig.recommended(dtype=d) for d in (torch.float64, torch.float32, torch.bfloat16)}


def sketched_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, config: SketchConfig | None = None
) -> Tensor:
    """Return x Wᵀ + b as F.linear does, and keep a sketch of x for ∂W in place of x itself.

    The output, ∂x and ∂b are those of F.linear; ∂W is unbiased. It is exact if the batch is too small to compress, or
    if the operation that made x keeps it anyway. If another operation keeps a copy of x in few bits, that copy serves.
    If ∂W is not needed, this is F.linear.

    Args:
        x: (..., in_features); weight: (out_features, in_features); bias: (out_features,).
        config: what to keep; ``SketchConfig.recommended()`` for x's own type by default.
    """
    config = _default_for(x) if config is None else check_config(config)
    return layer_linear(x, weight, bias, config, None)


def _default_for(x: Tensor) -> SketchConfig:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if autocast_on(device) else x.dtype
    return _DEFAULTS.get(dtype.itemsize, _DEFAULTS[4])


def layer_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: SketchConfig, layer: nn.Module | None
) -> Tensor:
    """Do what ``sketched_linear`` does for a ``layer``, which says whether to sketch inside checkpoints."""
    if transforms_active():
        check_forward(weight)
        if not weight.requires_grad:
            return F.linear(x, weight, bias)
    # Drawn even where it is not needed. Reentrant checkpointing runs a region under no_grad first, where the weight may
    # seem not to train, and then again with gradients. Both runs must draw the same number of random numbers.
    seed = None if torch.compiler.is_compiling() else draw_seed(x.device)
    if not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if not weight.requires_grad:
        return F.linear(x, weight, bias)
    check_inputs(x, weight)
    if is_tracing():
        raise RuntimeError(_TRACED)
    if seed is None:
        if is_exporting():
            raise RuntimeError(_EXPORTED)
        if config.keeps_all:  # an operator would have to copy x to keep it
            return F.linear(x, weight, bias)
    device = x.device.type
    if not autocast_on(device):
        return _run(x, x, weight, bias, config, seed, None, layer)
    cast = torch.get_autocast_dtype(device)
    return _run(x, autocast_to(x, cast), weight, bias, config, seed, cast, layer)


def _run(
    source: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: SketchConfig,
    seed: Tensor | None,
    cast: torch.dtype | None,
    layer: nn.Module | None,
) -> Tensor:
    if seed is None:  # compiling: the operator draws the seed, and the compiler merges equal calls
        kept = traced_keep(as_rows(x.detach()), config.as_json)
        return _apply(x, weight, bias, config.as_json, cast, None, kept)
    inside = inside_checkpoint()
    if not inside and not transforms_active() and (copy := packed_copy(x)) is not None:
        return _apply(x, weight, bias, copy.held_by(()), cast, None, copy.tensors)
    if _stays_exact(x, config, layer, inside):
        return _apply(x, weight, bias, None, cast, None, (x.detach(),))
    reader = _weight_id(weight) if layer is None else id(layer)
    if inside or is_fake(x):
        valid, kept = opaque_keep(source.detach(), x.detach(), seed, reader, config.as_json)
    else:
        valid, kept = keep_or_share(source, x.detach(), seed, reader, config)
    return _apply(x, weight, bias, config, cast, valid, kept)


def _stays_exact(x: Tensor, config: SketchConfig, layer: nn.Module | None, inside: bool) -> bool:
    """Tell whether to keep x itself: because a sketch saves nothing, or the layer stays exact inside checkpoints."""
    if config.keeps_input(x.shape[:-1].numel()):
        return True
    if transforms_active():
        return False
    if not inside:
        held = held_by_producer(x)
        if held and layer is not None:
            layer.__dict__[INPUT_IS_HELD] = True
        return held
    if layer is not None:
        layer.__dict__[RAN_IN_CHECKPOINT] = True
        if layer.__dict__.get(EXACT_IN_CHECKPOINT):
            return True
    if saved_by_producer(x):
        return True
    warn_of_checkpoint()
    return False


def _weight_id(weight: Tensor) -> int:
    """Return a number that identifies a weight; inside torch.func, where layers share nothing, always 0."""
    return 0 if transforms_active() else memory_id(weight)


# Attributes of a layer that tell how it ran and how it was converted.
RAN_IN_CHECKPOINT, EXACT_IN_CHECKPOINT = "_ran_in_checkpoint", "_exact_in_checkpoint"
INPUT_IS_HELD = "_input_is_held"


def _apply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: How,
    cast: torch.dtype | None,
    valid: Tensor | None,
    kept: tuple[Tensor, ...],
) -> Tensor:
    transformed = transforms_active()
    function = _TransformedLinear if transformed else _SketchedLinear
    # An empty slice of x links ∂W to the graph of x without its memory, so that a second derivative raises.
    origin = (x[:0].clone(),) if (x.requires_grad or transformed) and not isinstance(how, str) else ()
    out: Tensor
    if cast is None:
        out = function.apply(x, weight, bias, how, cast, valid, origin, *kept)  # type: ignore[no-untyped-call]
    else:
        with torch.autocast(x.device.type, enabled=False):
            out = function.apply(x, weight, bias, how, cast, valid, origin, *kept)  # type: ignore[no-untyped-call]
    return out


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: How,
    cast: torch.dtype | None,
    valid: Tensor | None,
    origin: tuple[Tensor, ...],
    *kept: Tensor,
) -> Tensor:
    # Cast here and not by autocast, whose cache would hand this detached copy to other users of the weight.
    out = F.linear(x, autocast_to(weight, cast), None if bias is None else autocast_to(bias, cast))
    # F.linear may return a view, and autograd forbids in-place changes of a view that a Function returns.
    return out if out.dim() == 2 else not_a_view(out)


def _remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
    x, weight, bias, how, _, valid, ctx.origin, *kept = inputs
    # The seed and the mask are saved tensors like the rows: checkpointing recomputes all of them, or none.
    ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, valid, *kept)
    ctx.valid = valid  # valid_for reads this attribute while checkpointing recomputes
    ctx.how = how
    ctx.in_features, ctx.weight_dtype = weight.shape[1], weight.dtype
    ctx.column_major = x.dim() == 2 and x.stride(0) == 1 and x.stride(1) == x.shape[0]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


class _SketchedLinear(torch.autograd.Function):
    """F.linear whose weight gradient comes from what was kept of x: ∂W = (SᵀY)ᵀ(SᵀX)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _remember(ctx, inputs)
        if isinstance(ctx.how, SketchConfig):
            ctx.kept = tuple(map(ref, inputs[7:]))  # for a monitor, if autograd keeps them as they are
        return _forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad_out)


class _TransformedLinear(_SketchedLinear):
    """The same in the form that torch.func needs; PyTorch takes several times as long to call it."""

    forward = staticmethod(_forward)  # type: ignore[assignment]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _remember(ctx, inputs)


def _backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
    if transforms_active():
        check_backward()
    if grad_out is None:
        return (None,) * len(ctx.needs_input_grad)
    device = grad_out.device.type
    if not autocast_on(device):
        return _gradients(ctx, grad_out)
    with torch.autocast(device, enabled=False):
        return _gradients(ctx, grad_out)


def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    weight, valid, *kept = ctx.saved_tensors
    y = as_rows(grad_out)
    grad_x = grad_weight = grad_bias = None
    if valid is not None:
        check_promise(valid, y.detach())
    if ctx.needs_input_grad[1]:  # first, so that the compressed Y is freed before ∂x is made
        grad_weight = _estimate(ctx, y, valid, tuple(kept))
    if ctx.needs_input_grad[0]:
        weight = weight.to(grad_out.dtype)
        # nn.Linear gives a column-major x a column-major gradient; the product in the other order rounds differently.
        grad_x = (weight.t() @ grad_out.t()).t() if ctx.column_major else grad_out @ weight
    if ctx.needs_input_grad[2]:
        grad_bias = y.sum(0).to(ctx.bias_dtype)
    return grad_x, grad_weight, grad_bias, *(None for _ in ctx.needs_input_grad[3:])


def _estimate(ctx: Any, y: Tensor, valid: Tensor | None, kept: tuple[Tensor, ...]) -> Tensor:
    """Return ∂W. With ``create_graph=True``, ∂x and ∂b can be differentiated; differentiating ∂W raises an error."""
    if torch.compiler.is_compiling() and isinstance(ctx.how, (SketchConfig, str)):
        how = ctx.how if isinstance(ctx.how, str) else ctx.how.as_json  # compiled autograd runs eager graphs too
        return traced_weight_gradient(kept, y, how, ctx.in_features, valid).to(ctx.weight_dtype)
    if not torch.is_grad_enabled():
        return _product(ctx, y, valid, kept)
    with torch.no_grad():
        gradient = _product(ctx, y, valid, kept)
    guarded: Tensor = _RaiseIfDifferentiated.apply(gradient, y, *ctx.origin)  # type: ignore[no-untyped-call]
    return guarded


def _product(ctx: Any, y: Tensor, valid: Tensor | None, kept: tuple[Tensor, ...]) -> Tensor:
    if ctx.how is None:
        gradient = y.t() @ as_rows(kept[0])
    elif isinstance(ctx.how, PackedTensor):
        gradient = y.t() @ as_rows(ctx.how.held_by(kept).unpack())
    elif is_fake(y):
        gradient = traced_weight_gradient(kept, y, ctx.how.as_json, ctx.in_features, valid)
    else:
        gradient = weight_gradient(kept, y, ctx.how, ctx.in_features, valid)
    return gradient.to(ctx.weight_dtype)


class _RaiseIfDifferentiated(torch.autograd.Function):
    """The identity on a gradient, with a backward that raises. The gradient was computed from ``origins``."""

    @staticmethod
    def forward(gradient: Tensor, *origins: Tensor) -> Tensor:
        return not_a_view(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise RuntimeError(_TWICE)


_EXPORTED = (
    "torch.export would lose the gradient of a sketched layer that trains: export the model in eval(), or call "
    "backsketch.unsketch_(model) first"
)
_TRACED = (
    "torch.jit.trace would freeze the random numbers of a sketched layer that trains: trace the model in eval(), or "
    "call backsketch.unsketch_(model) first; torch.compile takes it as it is"
)
_TWICE = (
    "a sketched layer cannot be differentiated twice by its weight, whose gradient is an estimate from what is kept. "
    "For a Hessian use exact layers: backsketch.unsketch_(model)"
)

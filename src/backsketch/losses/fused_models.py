"""fuse_loss_ and unfuse_loss_: let language models compute their loss without logits of all rows at once, and undo it.

The model and its head get a subclass of their own class. While the model runs forward with labels, its head returns
``DeferredLogits``, of which cross-entropy makes a fused loss.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..argument_checks import check_model, check_positive
from ..changed_forward import FUSED_LOSS, change_forward, class_before, register_way, restore_forward, setting_of
from ..linear.layer import refuse_script
from ..linear.twin_registry import twins
from ..made_classes import one_for_each_class, subclass_with_forward
from ..sharded import cover, is_covered, is_sharded, own_class, put_over, uncover
from ..torch_private import is_tracing, runs_inside_compile, transforms_active
from . import deferred_operations  # noqa: F401 (it tells what functions do to deferred logits)
from .deferred_logits import DeferredLogits

Model = TypeVar("Model", bound=nn.Module)

_REPLACED = "_forward_without_fused_loss"  # the forward that a model's instance had
_LABELS = ("labels", "shift_labels")


@dataclass(frozen=True, slots=True)
class FusedLoss:
    """How a model computes its loss: of how many rows logits exist at a time; None leaves it to the loss."""

    chunk: int | None = None


def fuse_loss_(model: Model, *, chunk: int | None = None) -> Model:
    """Let the language models in ``model`` compute their loss from hidden states, some rows at a time; return it.

    For models of transformers, and others with ``get_output_embeddings`` and ``labels=``. In a step of training with
    labels no logits of all rows exist, neither at the peak nor for backward; loss and gradients are exact. The model
    then returns None as logits. In eval(), without labels and without gradients it returns logits as before.

    The model keeps its identity: classes change, parameters, optimisers, hooks, tied weights and ``state_dict`` do not.
    A model that Liger has patched stays as it is, with a warning.

    Args:
        model: a model, or a module that holds some: of PEFT, of Lightning, a DistributedDataParallel.
        chunk: of how many rows logits exist at a time; by default as ``linear_cross_entropy`` chooses.
    """
    check_model(model)
    if chunk is not None:
        check_positive("chunk", chunk)
    chosen = fusable_models(model)
    for name in language_models(model).keys() - chosen.keys():
        warnings.warn(f"fuse_loss_: {name or 'the model'} {_LIGER}", stacklevel=2)
    for module in chosen.values():
        _fuse(module, FusedLoss(chunk))
    return model


def fusable_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module for the language models that ``fuse_loss_`` changes, or raise its ValueError."""
    found = language_models(model)
    if not found:
        raise ValueError(_NONE_FOUND.format(kind=type(model).__name__))
    chosen = {name: module for name, module in found.items() if not _is_of_liger(module)}
    for name, module in chosen.items():
        _check_head(name, module)
    return chosen


def can_fuse(model: nn.Module) -> bool:
    """Tell whether ``fuse_loss_`` changes a model."""
    try:
        return bool(fusable_models(model))
    except ValueError:
        return False


def unfuse_loss_(model: Model) -> Model:
    """Undo ``fuse_loss_``: let all models in ``model`` compute their logits again, and return it."""
    check_model(model)
    for module in model.modules():
        if (before := module.__dict__.pop(_REPLACED, None)) is not None:
            module.__dict__["forward"] = before
        restore_forward(module, FUSED_LOSS)
        uncover(module, deferring_head_class)
    return model


def fused_losses(model: nn.Module) -> dict[str, FusedLoss]:
    """Return name -> setting for the modules whose loss is fused."""
    settings = {name: setting_of(module, FUSED_LOSS) for name, module in model.named_modules()}
    return {name: setting for name, setting in settings.items() if setting is not None}


def fuse_again(model: nn.Module, fused: Mapping[str, FusedLoss]) -> None:
    """Fuse the losses that ``fused_losses`` returned earlier, and no others."""
    unfuse_loss_(model)
    for name, setting in fused.items():
        _fuse(model.get_submodule(name), setting)


def is_deferring_head(module: nn.Module) -> bool:
    """Tell whether a module is the head of a model whose loss is fused."""
    return is_covered(module, deferring_head_class)


def language_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module for the modules that have a head and take labels."""
    return {name: module for name, module in model.named_modules() if _takes_labels(module) and _head(module)}


def _takes_labels(module: nn.Module) -> bool:
    if not callable(getattr(type(module), "get_output_embeddings", None)):
        return False
    return "labels" in inspect.signature(class_before(module).forward).parameters


def _head(module: Any) -> nn.Module | None:
    head = module.get_output_embeddings()
    return head if isinstance(head, nn.Module) else None


def _linear_layers(head: nn.Module) -> list[nn.Module]:
    """Return the linear layers that compute a head's logits: itself, or those that PEFT trains in its place."""
    linear = (nn.Linear, twins()[nn.Linear])
    if own_class(head) in linear:
        return [head]
    inside: list[nn.Module] = []
    if isinstance(copies := getattr(head, "modules_to_save", None), nn.ModuleDict):
        inside = [head.get_submodule("original_module"), *copies.values()]
    return inside if all(own_class(each) in linear for each in inside) else []


def _check_head(name: str, module: nn.Module) -> None:
    """Raise ValueError if logits cannot be left to the loss."""
    head = _head(module)
    assert head is not None
    layers = _linear_layers(head)
    whose = f"the head of {name or 'the model'}"
    if not layers:
        raise ValueError(f"fuse_loss_: {whose} must be an nn.Linear, got {_named(head)}; {_OWN_LOSS}")
    if any(is_sharded(each) for each in (head, *layers)):
        raise ValueError(f"fuse_loss_: {whose} is sharded on its own: its weight is gone before the loss; {_SHARD}")
    if any("forward" in each.__dict__ for each in (head, *layers)):
        raise ValueError(f"fuse_loss_: the forward of {whose} was replaced, as accelerate's offloading does")


def _named(head: nn.Module) -> str:
    return f"{type(head).__module__}.{type(head).__qualname__}"


def _is_of_liger(module: nn.Module) -> bool:
    forward = inspect.unwrap(module.__dict__.get("forward", class_before(module).forward))
    return str(getattr(forward, "__module__", "")).partition(".")[0] == "liger_kernel"


def _fuse(module: nn.Module, setting: FusedLoss) -> None:
    head = _head(module)
    assert head is not None
    for layer in _linear_layers(head):
        cover(layer, deferring_head_class)
    change_forward(module, FUSED_LOSS, setting)
    if "forward" in module.__dict__ and _REPLACED not in module.__dict__:  # by accelerate, bound to the class of then
        module.__dict__[_REPLACED] = module.__dict__["forward"]
        module.__dict__["forward"] = MethodType(_forward_on_instance, module)


def _forward_on_instance(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _run_deferring(self, self.__dict__[FUSED_LOSS], self.__dict__[_REPLACED], *args, **kwargs)


@register_way(FUSED_LOSS)
def _run_deferring(
    module: nn.Module, setting: FusedLoss, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a model's forward, and let its head leave the logits to the loss if it trains with labels."""
    trains = module.training and torch.is_grad_enabled() and not is_tracing()
    if not trains or not _labels_given(module, args, kwargs):
        return forward(*args, **kwargs)
    if runs_inside_compile():
        raise RuntimeError(_COMPILED)
    if transforms_active():
        raise RuntimeError(_TRANSFORMED)
    if _head_changed(module):
        warnings.warn(_CHANGED, stacklevel=2)
        return forward(*args, **kwargs)
    before, _of_thread.deferring = _of_thread.deferring, setting
    try:
        return _without_deferred(forward(*args, **kwargs))
    finally:
        _of_thread.deferring = before


def _head_changed(module: nn.Module) -> bool:
    """Tell whether a model has got another head since its loss was fused, or one that is sharded on its own."""
    head = _head(module)
    layers = [] if head is None else _linear_layers(head)
    return any(is_sharded(each) for each in layers) or (bool(layers) and not any(map(is_deferring_head, layers)))


@put_over
@one_for_each_class
def deferring_head_class(own: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``own``, a linear layer, that defers its logits while a model with a fused loss runs."""

    @functools.wraps(own.forward)
    def forward(self: Any, input: Tensor) -> Tensor:
        fused = _of_thread.deferring
        if (
            fused is not None
            and self.training
            and torch.is_grad_enabled()
            and _is_usual(self.weight)
            and _is_usual(input)
        ):
            return DeferredLogits.of(input, self.weight, self.bias, fused.chunk)
        return own.forward(self, input)  # type: ignore[no-any-return]

    return subclass_with_forward(own, forward, __prepare_scriptable__=lambda self: refuse_script())


def _is_usual(tensor: Tensor) -> bool:
    """Tell whether a tensor is here and whole: not split over devices, nor taken away after the layer."""
    return type(tensor) in (Tensor, nn.Parameter) and not hasattr(tensor, "ds_id")  # of DeepSpeed


class _OfThread(threading.local):
    deferring: FusedLoss | None = None


_of_thread = _OfThread()


def _labels_given(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if any(kwargs.get(name) is not None for name in _LABELS):
        return True
    names = list(inspect.signature(class_before(model).forward).parameters)[1:] if args else []
    return any(name in _LABELS and value is not None for name, value in zip(names, args, strict=False))


def _without_deferred(output: Any) -> Any:
    """Return what a model returned, with None for logits of which a loss was made, and with all others computed."""
    if isinstance(output, DeferredLogits):
        return None if output.call.fused else output.compute()
    if type(output) in (tuple, list):
        return type(output)(_without_deferred(each) for each in output)
    if is_dataclass(output) and not isinstance(output, type):
        values = {each.name: getattr(output, each.name) for each in fields(output)}
    elif isinstance(output, Mapping):
        values = dict(output)
    else:
        return output
    if not any(isinstance(value, DeferredLogits) for value in values.values()):
        return output
    kind: Any = type(output)
    return kind(**{name: _without_deferred(value) for name, value in values.items()})


_OWN_LOSS = "backsketch.linear_cross_entropy(hidden, weight, target) is the same loss for a forward of your own"
_NONE_FOUND = (
    "fuse_loss_ found no language model in {kind}: none has get_output_embeddings() and takes labels; " + _OWN_LOSS
)
_SHARD = "call fully_shard on the model and its blocks alone"
_CHANGED = (
    "a model with a fused loss has got another head since, or fully_shard was called on its head: the logits are "
    f"computed and kept as without fuse_loss_. Call fuse_loss_ again after a change of the head; {_SHARD}"
)
_LIGER = "stays as it is: Liger has patched it, which fuses its loss itself"
_COMPILED = (
    "torch.compile cannot compile a model with a fused loss as a whole: compile the part below its head, for example "
    "model.model.compile(), or call backsketch.unfuse_loss_(model)"
)
_TRANSFORMED = (
    "a model with a fused loss cannot run inside a transform of torch.func: call backsketch.unfuse_loss_(model)"
)

"""checkpoint_ and uncheckpoint_: let chosen blocks of a model run under activation checkpointing, and no longer."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..argument_checks import check_model
from ..changed_forward import (
    CHECKPOINTING,
    change_forward,
    class_before,
    register_way,
    restore_forward,
    setting_of,
    why_not_changeable,
)
from ..linear.checkpointing import inside_checkpoint

Model = TypeVar("Model", bound=nn.Module)


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the repeated blocks of ``model``, in the order in which it has them.

    A block is a layer that transformers checkpoints, or a member of a ModuleList or Sequential that has at least two of
    its class; it has parts of its own. Of blocks inside blocks, the outermost count.
    """
    check_model(model)
    return tuple(_outermost(model, ""))


def checkpoint_(model: Model, blocks: Iterable[str]) -> Model:
    """Let these blocks of ``model`` keep only their inputs for backward, which runs them again; return the model.

    It is torch's checkpointing without reentrance, while a block is in train() and gradients are on. Gradients are
    exact, dropout draws the same values again, and the keys of ``state_dict`` stay. As with torch's own, buffers that
    forward changes, such as running statistics, change once more in backward. Blocks that are checkpointed already stay
    so. As under transformers' own checkpointing, a block gets no cache of keys and values.

    Args:
        model: any module.
        blocks: names of modules, "" for the model itself; ``blocks_of(model)`` returns all repeated ones.
    """
    check_model(model)
    if isinstance(blocks, str) or not isinstance(blocks, Iterable):
        raise TypeError(f"blocks must be names of modules, as blocks_of(model) returns them, got {blocks!r}")
    modules, chosen = dict(model.named_modules()), list(blocks)
    if unknown := [name for name in chosen if name not in modules]:
        known = ", ".join(blocks_of(model)) or "none"
        raise ValueError(f"blocks must be names of modules of the model, got {unknown}; its repeated blocks: {known}")
    for name in chosen:
        if setting_of(modules[name], CHECKPOINTING) is None and (reason := why_not_changeable(modules[name])):
            raise ValueError(f"block {name!r} cannot be checkpointed: {reason}")
    for name in chosen:
        change_forward(modules[name], CHECKPOINTING, True)
    return model


def uncheckpoint_(model: Model) -> Model:
    """Undo ``checkpoint_`` in all blocks of ``model`` and return it."""
    check_model(model)
    for module in model.modules():
        restore_forward(module, CHECKPOINTING)
    return model


def present_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the blocks that ``checkpoint_`` has changed."""
    return tuple(name for name, module in model.named_modules() if setting_of(module, CHECKPOINTING) is not None)


@register_way(CHECKPOINTING)
def _run_checkpointed(module: nn.Module, on: bool, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward under checkpointing, with its inputs as arguments, where ``rest`` can pack them."""
    if not module.training or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not torch.compiler.is_compiling():
        if inside_checkpoint():  # which runs this block again anyway
            return forward(*args, **kwargs)
        args, kwargs = _without_cache(args, kwargs)
    inputs = {name: value for name, value in kwargs.items() if isinstance(value, Tensor) and value.requires_grad}
    others = {name: value for name, value in kwargs.items() if name not in inputs}
    run = partial(_call, forward, len(args), tuple(inputs), others)
    return checkpoint(run, *args, *inputs.values(), use_reentrant=False)


def _call(forward: Callable[..., Any], count: int, names: tuple[str, ...], others: dict[str, Any], *values: Any) -> Any:
    return forward(*values[:count], **dict(zip(names, values[count:], strict=True)), **others)


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take a cache of transformers out of a call: the second pass would append the same keys and values again."""
    if "transformers.cache_utils" not in sys.modules:
        return args, kwargs
    from transformers.cache_utils import Cache

    if kwargs.get("use_cache"):
        kwargs = kwargs | {"use_cache": False}
    without = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
    return tuple(None if isinstance(value, Cache) else value for value in args), without


def _outermost(module: nn.Module, name: str) -> Iterator[str]:
    told = _told_layers()
    counted: Counter[type] = Counter()
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        counted.update(class_before(child) for child in module.children() if _is_block(child))
    for part, child in module.named_children():
        path = f"{name}.{part}" if name else part
        if isinstance(child, told) or (counted[class_before(child)] > 1 and _is_block(child)):
            yield path
        else:
            yield from _outermost(child, path)


def _is_block(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and why_not_changeable(module) is None


def _told_layers() -> tuple[type[nn.Module], ...]:
    """Return the class of the layers that transformers checkpoints; it has one from 4.52 on."""
    if "transformers" not in sys.modules:
        return ()
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:
        return ()
    return (GradientCheckpointingLayer,)

"""Models tell by themselves which rows count: hooks on all that takes an ``attention_mask`` put it in force."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..argument_checks import check_model
from ..torch_private import in_backward
from .scopes import Mask, ModuleCall, Scope, flat, in_force

_HANDLES, _IGNORED = "_attention_mask_hooks", "_ignores_attention_mask"
_REST = "**"  # stands for a forward's keyword arguments without a name

# What a forward takes beside the tokens that its attention_mask is about: layers may then read either.
_OTHER_INPUTS = {"decoder_input_ids", "input_features", "pixel_values"}


def ignore_attention_mask(model: nn.Module, ignore: bool = True) -> None:
    """Make ``sketch_`` and the trainers' callbacks take no notice of the attention masks that ``model`` is called with.

    For a model whose padded rows do get a gradient, or to sketch them like all others. ``ignore=False`` undoes it.
    """
    check_model(model)
    followed = any(_HANDLES in module.__dict__ for module in model.modules())
    model.__dict__[_IGNORED] = ignore
    if ignore or followed:
        follow_attention_mask(model)


def follow_attention_mask(model: nn.Module) -> None:
    """Make the sketched layers of ``model`` leave out the rows that an attention_mask says are padding.

    A mask (batch, sequence) that a module is called with applies to all modules inside. Without one, the mask of the
    outer module applies. A module that reads other tokens as well, as a decoder does, clears it; modules inside may
    be called with their own. Only padding at the end is left out.
    """
    forget_attention_mask(model)
    for module in _concerned(model):
        module.__dict__[_HANDLES] = (
            module.register_forward_pre_hook(_before_forward, with_kwargs=True),
            module.register_forward_hook(_after_forward, with_kwargs=True, always_call=True),
        )


def forget_attention_mask(model: nn.Module) -> None:
    """Undo follow_attention_mask for ``model`` and everything in it."""
    for module in model.modules():
        for handle in module.__dict__.pop(_HANDLES, ()):
            handle.remove()


def _concerned(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules that may be called with a mask, and those that ignore it: nothing inside these follows one."""
    ignoring: set[nn.Module] = set()
    for module in model.modules():
        if module in ignoring:
            continue
        parameters = _parameters(type(module).forward)
        if module.__dict__.get(_IGNORED):
            ignoring.update(module.modules())
            yield module
        elif "attention_mask" in parameters or (module is model and _REST in parameters):
            yield module


_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    """Put the scope of this call in force, and give torch keyword arguments that tell as long as the call runs."""
    if torch.compiler.is_compiling() or in_backward():  # checkpoints recall their masks
        return None
    around = in_force.innermost
    if around is not None and around.holds:
        return None
    scope = _scope_for(module, args, kwargs)
    if scope is None:
        return None
    call = ModuleCall(kwargs)
    scope.module, scope.call = weakref.ref(module), weakref.ref(call)
    in_force.put(scope)
    return args, call


def _scope_for(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scope | None:
    """Return the scope of a call with these arguments, or None if the scope around it stays in force."""
    parameters = _parameters(type(module).forward)

    def given(name: str) -> Any:
        position = parameters.get(name, len(args))
        return args[position] if position < len(args) else kwargs.get(name)

    mask = given("attention_mask")
    if module.__dict__.get(_IGNORED):
        return Scope(None, holds=True)
    if _OTHER_INPUTS & parameters.keys() or given("encoder_hidden_states") is not None:
        return Scope(None)
    if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point():
        rows, whole = torch.ops.backsketch.counting_rows(mask)
        return Scope(None if whole else Mask(rows, mask.shape))
    return Scope(None) if in_force.is_open(module) else None  # a call that broke off leaves the next one no mask


def _counting_rows(mask: Tensor) -> tuple[Tensor, bool]:
    """Return which rows count, (batch · sequence,), and whether all do, as far as that is known without waiting."""
    rows = flat(_but_the_end(mask))
    return rows, rows.is_cpu and bool(rows.all())


# One operator, so that selective checkpointing, which repeats a region without its mask, caches no step of this.
_library: Any = torch.library.Library("backsketch", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("counting_rows(Tensor mask) -> (Tensor, bool)")
_library.impl("counting_rows", _counting_rows, "CompositeExplicitAutograd")
torch.library.register_fake(
    "backsketch::counting_rows", lambda mask: (mask.new_empty(mask.numel(), dtype=torch.bool), False), lib=_library
)


def _but_the_end(mask: Tensor) -> Tensor:
    """Return True for all tokens but padding at the end; a text that begins with padding is kept whole.

    (batch, sequence) -> the same, bool. In a causal model the last padded token before a text predicts its first word,
    so it has a gradient; as it may read nothing, eager attention makes it read everything, padding at the end too.
    """
    counts = mask != 0
    return (counts.flip(1).cumsum(1).flip(1) > 0) | ~counts[:, :1]


def _after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if not torch.compiler.is_compiling():
        in_force.lift_of(kwargs)


@lru_cache
def _parameters(forward: Callable[..., Any]) -> dict[str, int]:
    """Return what forward(self, …) takes by name, and where among the arguments after self, if it may stand there."""
    parameters = inspect.signature(forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = {p.name: index - 1 if p.kind in positional else sys.maxsize for index, p in enumerate(parameters)}
    return found | {_REST: sys.maxsize} if any(p.kind == p.VAR_KEYWORD for p in parameters) else found

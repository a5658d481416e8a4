"""Which rows count: rows of padded tokens get no gradient, so nothing need be kept of them.

That their gradient is zero is the caller's promise. It holds where padded tokens are masked in attention and loss.
A layer that torch.compile traces takes no notice of masks: its gradient is as unbiased, and as noisy as without one.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn


@dataclass(eq=False, slots=True)
class _Mask:
    """A mask, flat and on the device where it was last needed, and which input shapes have met it."""

    rows: Tensor
    shape: torch.Size
    used: bool = False
    seen: set[torch.Size] = field(default_factory=set)

    def for_input(self, x: Tensor) -> Tensor | None:
        """Return which rows of x are valid, (rows,) bool, or None where the mask is of another shape."""
        shape = x.shape[:-1]
        if shape != self.shape:
            self.seen.add(shape)
            return None
        self.used = True
        if self.rows.device != x.device:
            self.rows = self.rows.to(x.device, non_blocking=not x.is_cpu)  # the host would read before it is there
        return self.rows


class _InForce(threading.local):
    """The masks of the calls that are running, innermost last, each with the module whose hook put it there."""

    def __init__(self) -> None:
        self.stack: list[tuple[_Mask | None, nn.Module | None]] = []

    @property
    def mask(self) -> _Mask | None:
        return self.stack[-1][0] if self.stack else None


_Call: TypeAlias = tuple[int, torch.Size]  # the seed that a call drew, and the leading shape of its input

_in_force = _InForce()
_by_call: weakref.WeakValueDictionary[_Call, Tensor] = weakref.WeakValueDictionary()
_replaced: weakref.WeakValueDictionary[_Call, Tensor] = weakref.WeakValueDictionary()


@contextmanager
def valid_rows(mask: Tensor) -> Iterator[None]:
    """Leave the rows where ``mask`` is 0 out of every sketch made inside: ``with valid_rows(mask): loss = model(...)``.

    The mask has the leading shape of the layers' inputs, as an attention mask (batch, sequence) has. Inputs of another
    shape, such as a pooled (batch, features), are sketched as a whole; a mask that fits no input at all is an error.
    The caller promises that masked rows get no gradient: what they would add to the weight gradient is left out.
    Compiled layers and reentrant checkpointing do without it: their sketches are of all rows. Other checkpointing finds
    it again by the random numbers drawn, so its ``preserve_rng_state`` must stay True.
    """
    if torch.compiler.is_compiling():
        yield
        return
    entry = _Mask(_flat(mask), mask.shape)
    _in_force.stack.append((entry, None))
    try:
        yield
    finally:
        _in_force.stack.pop()
    if entry.seen and not entry.used:
        shapes = ", ".join(str(tuple(shape)) for shape in sorted(entry.seen))
        raise ValueError(
            f"mask must have the leading shape of a sketched layer's input, got {tuple(mask.shape)}; "
            f"the inputs had {shapes}"
        )


def masked_rows(x: Tensor) -> Tensor | None:
    """Return which rows of x count by the mask in force, or None if all do."""
    mask = _in_force.mask
    return None if mask is None else mask.for_input(x)


def valid_for(x: Tensor, seed: Tensor) -> Tensor | None:
    """Return which rows of x count in the call that drew this seed, or None if all do.

    Checkpointing calls a layer again in backward, after the mask was lifted; it draws the same seed again, which tells
    what mask the first call had.
    """
    call = (int(seed), x.shape[:-1])  # read in both passes: selective checkpointing compares what they ask of tensors
    if torch._C._current_graph_task_id() != -1:
        return _recalled(call)
    valid = masked_rows(x)
    if valid is not None:
        if (other := _by_call.get(call, valid)) is not valid and not torch.equal(other, valid):
            _replaced[call] = other
        _by_call[call] = valid
    return valid


def _recalled(call: _Call) -> Tensor | None:
    if call in _replaced:
        raise RuntimeError(
            "two forward passes drew the same random numbers under different masks, so checkpointing cannot tell "
            "which mask to use again: do not reset the random seed between them"
        )
    return _by_call.get(call)


def check_promise(valid: Tensor, y: Tensor) -> None:
    """Warn, once for each mask, where masked rows get a gradient after all: valid (rows,), y (rows, out_features)."""
    if y.device.type != "cpu" or hasattr(valid, _CHECKED):  # an accelerator would have to be waited for
        return
    setattr(valid, _CHECKED, True)
    if bool(y[~valid].any()):
        warnings.warn(
            "rows that the mask leaves out get a gradient: their part of the weight gradient is missing. Mask them in "
            "the loss too (labels of -100), or call backsketch.padding.ignore_attention_mask(model)",
            RuntimeWarning,
            stacklevel=2,
        )


def follow_attention_mask(model: nn.Module) -> None:
    """Make ``model`` apply the attention_mask it is called with, if it takes one, to its sketched layers.

    Where there is a decoder the mask is the encoder's alone: the decoder's own rows are other tokens.
    """
    ignore_attention_mask(model)
    if "decoder_input_ids" in inspect.signature(type(model).forward).parameters and hasattr(model, "get_encoder"):
        model = model.get_encoder()  # type: ignore[operator]
    if _mask_position(type(model).forward) is None:
        return
    model.__dict__[_HANDLES] = (
        model.register_forward_pre_hook(_before_forward, with_kwargs=True),
        model.register_forward_hook(_after_forward, always_call=True),
    )


def ignore_attention_mask(model: nn.Module) -> None:
    """Undo follow_attention_mask for ``model`` and everything in it."""
    for module in model.modules():
        for handle in module.__dict__.pop(_HANDLES, ()):
            handle.remove()


_HANDLES = "_attention_mask_hooks"
_CHECKED = "_promise_checked"


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    position = _mask_position(type(module).forward)
    given = args[position] if position is not None and 0 <= position < len(args) else None
    mask = kwargs.get("attention_mask", given)
    current = _in_force.mask
    if current is None and isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point():
        rows = _flat(mask)
        # Nothing padded, nothing to do; on an accelerator asking would wait for it.
        current = None if rows.device.type == "cpu" and bool(rows.all()) else _Mask(rows, mask.shape)
    _in_force.stack.append((current, module))


def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if _in_force.stack and _in_force.stack[-1][1] is module:  # not where the hook before was traced, and did nothing
        _in_force.stack.pop()


@lru_cache
def _mask_position(forward: Callable[..., Any]) -> int | None:
    """Return where forward(self, …) takes attention_mask, −1 for by keyword only, None for not at all."""
    parameters = list(inspect.signature(forward).parameters.values())
    names = [parameter.name for parameter in parameters if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    if "attention_mask" in names:
        return names.index("attention_mask") - 1
    by_keyword = any(p.kind == p.VAR_KEYWORD or p.name == "attention_mask" for p in parameters)
    return -1 if by_keyword else None


def _flat(mask: Any) -> Tensor:
    """Return which rows a mask lets count: (...) -> (rows,) bool."""
    if not isinstance(mask, Tensor) or mask.dim() == 0:
        raise TypeError(f"mask must be a tensor of at least one dimension, got {mask!r}")
    return mask.detach().reshape(-1) != 0

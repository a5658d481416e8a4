"""Which rows count: rows of padded tokens get no gradient, so nothing need be kept of them.

That their gradient is zero is the caller's promise. It holds where padded tokens are masked in attention and loss.
A layer that torch.compile traces takes no notice of masks: its gradient is as unbiased, and as noisy as without one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False, slots=True)
class Mask:
    """A mask, flat and on the device where it was last needed, and the shapes of inputs that it did not fit."""

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


class ModuleCall(dict[str, Any]):
    """The keyword arguments of a module's call, which only that call holds: they die with it, however it ends."""


@dataclass(eq=False, slots=True)
class Scope:
    """An active mask; None stands for no mask. It ends when its call has, or when it is lifted.

    ``holds`` is set by valid_rows and ignore_attention_mask: models called inside do not replace it by their own.
    ``module`` and ``call`` are of the module that was called with the mask; valid_rows has none.
    """

    mask: Mask | None
    holds: bool = False
    module: weakref.ref[nn.Module] | None = None
    call: weakref.ref[ModuleCall] | None = None

    @property
    def ended(self) -> bool:
        """Tell whether the call is over: torch runs no hook after a KeyboardInterrupt, so nobody lifts the scope."""
        return self.call is not None and self.call() is None


class InForce(threading.local):
    """The scopes of the calls that are running in this thread, innermost last."""

    def __init__(self) -> None:
        self._scopes: list[Scope] = []

    @property
    def innermost(self) -> Scope | None:
        """Return the scope in force, and forget those of calls that broke off."""
        while self._scopes and self._scopes[-1].ended:
            self._scopes.pop()
        return self._scopes[-1] if self._scopes else None

    def is_open(self, module: nn.Module) -> bool:
        """Tell whether a scope of ``module`` is in force: it calls itself, or a traceback keeps its last call alive."""
        return any(s.module is not None and s.module() is module and not s.ended for s in self._scopes)

    def put(self, scope: Scope) -> None:
        """Put a scope in force."""
        self._scopes.append(scope)

    def lift(self, scope: Scope) -> None:
        """Lift a scope and all inside it."""
        del self._scopes[self._scopes.index(scope) :]

    def lift_of(self, call: object) -> None:
        """Lift the scope of a module's call, if it has one."""
        for scope in reversed(self._scopes):
            if scope.call is not None and scope.call() is call:
                self.lift(scope)
                return


in_force = InForce()


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
    entry = Mask(flat(mask), mask.shape)
    scope = Scope(entry, holds=True)
    in_force.put(scope)
    try:
        yield
    finally:
        in_force.lift(scope)
    if entry.seen and not entry.used:
        shapes = ", ".join(str(tuple(shape)) for shape in sorted(entry.seen))
        raise ValueError(
            f"mask must have the leading shape of a sketched layer's input, got {tuple(mask.shape)}; "
            f"the inputs had {shapes}"
        )


def masked_rows(x: Tensor) -> Tensor | None:
    """Return which rows of x count by the mask in force, or None if all do."""
    scope = in_force.innermost
    return None if scope is None or scope.mask is None else scope.mask.for_input(x)


def flat(mask: Any) -> Tensor:
    """Return which rows a mask lets count: (...) -> (rows,) bool."""
    if not isinstance(mask, Tensor) or mask.dim() == 0:
        raise TypeError(f"mask must be a tensor of at least one dimension, got {mask!r}")
    return mask.detach().reshape(-1) != 0

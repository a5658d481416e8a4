"""packing: while it is active, what operations save for backward is kept in few bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..linear.checkpointing import inside_checkpoint
from ..storage.packed_copies import begin_or_end_pass
from ..torch_private import (
    call_checkpoint_savers_by,
    innermost_hooks,
    is_exporting,
    is_tracing,
    transforms_active,
    unwatched,
)
from .operations import OPERATIONS
from .rest_config import RestConfig
from .rules import Call, is_activation
from .saving import Kept, SavingStep


class packing:  # noqa: N801 (a context manager, used as a verb)
    """Keep in few bits what the operations inside the block save for backward.

    It does nothing inside another one, without gradients, inside activation checkpoints, in backward, and while a graph
    is traced.
    """

    __slots__ = ("_config", "_stack")

    def __init__(self, config: RestConfig) -> None:
        self._config = config
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        if torch.compiler.is_compiling() or _of_thread.step is not None or not torch.is_grad_enabled():
            return
        if transforms_active():
            raise RuntimeError(_TRANSFORMED)
        if is_tracing() or is_exporting() or inside_checkpoint():
            return
        step = SavingStep(self._config, unwatched(innermost_hooks()))
        if self._config.checkpoint is not None:
            call_checkpoint_savers_by(_save_checkpoint_inputs)
        with ExitStack() as stack:
            stack.callback(setattr, _of_thread, "step", None)
            _of_thread.step = step
            stack.callback(begin_or_end_pass)
            begin_or_end_pass()
            stack.enter_context(saved_tensors_hooks(step.pack, step.unpack))
            stack.enter_context(_Operations(step))
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stack is not None:
            self._stack.__exit__(kind, error, trace)


class packing_apart(packing):  # noqa: N801 (a context manager, used as a verb)
    """Packing whose config holds for the operations inside also while it is inside another one."""

    __slots__ = ()

    def __enter__(self) -> None:
        step = _of_thread.step
        if step is None or torch.compiler.is_compiling():
            super().__enter__()
            return
        self._stack = ExitStack()
        self._stack.callback(setattr, step, "config", step.config)
        step.config = self._config


class _Operations(TorchFunctionMode):
    """Tells operations apart: each runs by its rule, so that ``step`` knows which one is saving."""

    def __init__(self, step: SavingStep) -> None:
        super().__init__()
        self._step = step

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # a part of the model is compiled: its graph holds the operations as they are
            return function(*args, **(kwargs or {}))
        rule = OPERATIONS.get(function)
        if rule is None or not torch.is_grad_enabled() or inside_checkpoint() or transforms_active():
            return function(*args, **(kwargs or {}))
        return rule(Call(self._step, function, args, kwargs or {}))


class _OfThread(threading.local):
    step: SavingStep | None = None


_of_thread = _OfThread()


def _save_checkpoint_inputs(save: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a Function that saves the inputs of a checkpoint."""
    step = _of_thread.step
    if step is None or inside_checkpoint():
        return save(*args)

    def keep(tensor: Tensor) -> Kept | None:
        return step.few_bits(tensor, step.config.checkpoint) if is_activation(tensor) else None

    return step.run("checkpoint", keep, save, args, {})


_TRANSFORMED = (
    "a model whose whole step is kept in few bits cannot run inside a transform of torch.func: call "
    "backsketch.unsketch_(model), or backsketch.sketch_(model) without rest"
)

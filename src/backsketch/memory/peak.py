"""peak_memory: the peak of live tensor bytes in a step, what it is made of, and where it happens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..argument_checks import check_model
from ..linear import compiled_operators as ops
from ..tensor_storages import model_tensors, tensors_of
from ..torch_private import TorchDispatchMode, in_backward, is_fake, without_function_modes
from .live_storages import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATES, PARAMETERS, Change, LiveStorages, Peak, Place
from .running_module import RunningModule
from .saved_tensor_meter import Held, Watcher, watch_saved_tensors


class peak_memory:  # noqa: N801 (a context manager, used as a verb)
    """Follow every storage that operations inside the block make, use or drop, and find the peak of their bytes.

    It counts tensors, exactly: no allocator rounding, no fragmentation, no workspace hidden
    in a kernel. For eager mode. ``cuda`` has the allocator's own peak beside it where there is CUDA.

        with peak_memory(model, optimizer) as peak:
            model(batch).loss.backward()
            optimizer.step()
        print(peak.total, peak.parts, peak.place)

    Args:
        model: its parameters, buffers and gradients count from the start, and its module names tell where the peak is.
            Only storages on its device count; without a model, those on every device.
        optimizer: its states count from the start.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> None:
        if model is not None:
            check_model(model)
        if optimizer is not None and not hasattr(optimizer, "state"):  # wrappers have it too
            raise TypeError(f"optimizer must be an Optimizer of torch, got {type(optimizer).__name__}")
        own = () if model is None else model_tensors(model)
        self._device = next((tensor.device.type for tensor in own), None)
        self.cuda: int | None = None
        self._model = model
        self._optimizer = optimizer
        self._storages = LiveStorages(self._device)
        self._running = RunningModule(model)
        self._stack = ExitStack()
        self._followed: set[int] = set()
        self._gathered: list[ref[nn.Parameter]] = []
        self._saved_in: WeakKeyDictionary[Held, str | None] = WeakKeyDictionary()
        self._in_step = self._in_backward = False
        self._backward_of: str | None = None

    @property
    def peak(self) -> Peak:
        """Return the peak so far, with every storage that was live then."""
        return self._storages.peak()

    @property
    def total(self) -> int:
        """Return the bytes of the peak."""
        return self.peak.total

    @property
    def parts(self) -> dict[str, int]:
        """Return what the peak is made of: parameters, gradients, optimizer_states, activations, transients."""
        return self.peak.parts

    @property
    def place(self) -> Place | None:
        """Return where the peak happened."""
        return self.peak.place

    @property
    def changes(self) -> Sequence[Change]:
        """List every storage that came or went, in order, with its bytes and where it came."""
        return self._storages.changes

    @property
    def live(self) -> int:
        """Return the bytes that are live now; after the block, at its end."""
        return self._storages.total

    def __enter__(self) -> peak_memory:
        self._storages = LiveStorages(self._device)
        self._followed, self._gathered = set(), []
        for tensor in () if self._model is None else model_tensors(self._model):
            self._storages.see(tensor, None, PARAMETERS)
            self._follow(tensor)
        if self._optimizer is not None:
            self._see_states(self._optimizer)
        self._stack.enter_context(self._running)
        self._stack.enter_context(watch_saved_tensors(Watcher(self._saved, self._unpacked)))
        self._stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._stack.enter_context(_Watch(self))
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        if torch.cuda.is_available():
            self.cuda = torch.cuda.max_memory_allocated()
        self._stack.close()
        self._see_gathered()
        self._storages.stop()

    def used(self, tensors: list[Tensor]) -> None:
        """Take note of what an operation is about to read; what is new here came from outside the block."""
        now_in_backward = in_backward()
        if now_in_backward and not self._in_backward:
            self._storages.keep_for_backward()
        self._in_backward = now_in_backward
        self._see_gathered()
        for tensor in tensors:
            if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter) and id(tensor) not in self._followed:
                self._storages.see(tensor, None, PARAMETERS)
                self._follow(tensor)
                self._gathered.append(ref(tensor))
            else:
                self._storages.see(tensor, None)

    def run(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation; subclasses may run it in another way."""
        return operator(*args, **kwargs)

    def made(self, tensors: list[Tensor], op: str) -> None:
        """Take note of what an operation returned."""
        phase = "optimizer" if self._in_step else "backward" if self._in_backward else "forward"
        module = self._running.name
        if phase == "backward":  # where a checkpoint runs modules forward again
            self._backward_of = module = module or self._backward_of
        place = Place(phase, module, op)
        for tensor in tensors:
            self._storages.see(tensor, place)

    def _see_gathered(self) -> None:
        """Know the bytes of gathered weights, whose storages FSDP fills and empties without an operation."""
        for reference in self._gathered:
            if (parameter := reference()) is not None:
                self._storages.see(parameter, None, PARAMETERS)

    def _follow(self, parameter: Tensor) -> None:
        """Know the gradient of a parameter from the moment it is accumulated."""
        self._followed.add(id(parameter))
        if parameter.grad is not None:
            self._storages.see(parameter.grad, None, GRADIENTS)
        if parameter.is_leaf and parameter.requires_grad:
            handle = parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            self._stack.callback(handle.remove)

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._storages.see(parameter.grad, None, GRADIENTS)

    def _saved(self, held: Held) -> None:
        self._saved_in[held] = self._running.name
        for tensor in held.tensors:
            self._storages.see(tensor, None, ACTIVATIONS)

    def _unpacked(self, held: Held) -> None:
        self._backward_of = self._saved_in[held]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_step = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_step = False
        self._see_states(optimizer)

    def _see_states(self, optimizer: Optimizer) -> None:
        for tensor in tensors_of(list(optimizer.state.values())):
            self._storages.see(tensor, None, OPTIMIZER_STATES)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Show a peak_memory every operation, forward and backward."""

    def __init__(self, watcher: peak_memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (inside := ops.OPAQUE.get(func)) is not None and not any(map(is_fake, tensors_of(args))):
            with self:
                return inside(*args, **(kwargs or {}))
        with without_function_modes():  # which would see each storage that is asked for
            self._watcher.used(tensors_of((args, kwargs)))
            out = self._watcher.run(func, args, kwargs or {})
            self._watcher.made(tensors_of(out), _name(func))
        return out


@cache
def _name(operator: Any) -> str:
    return str(operator)

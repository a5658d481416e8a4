"""saved_memory: the bytes that autograd really holds for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, finalize

from torch import nn

from ..argument_checks import check_model
from ..tensor_storages import model_tensors, sizes
from .saved_tensor_meter import Held, Watcher, watch_saved_tensors


class saved_memory:  # noqa: N801 (a context manager, used as a verb)
    """Count what autograd holds for backward of everything computed inside, each storage once.

    The figures stay live after the block: they fall to zero as backward, or a dropped graph, lets the tensors go.
    Where other hooks run, inside or outside of the block (checkpointing, offloading, compressing), what they keep
    instead of a tensor counts: all tensors in what their pack returns.

        with saved_memory(model) as saved:
            loss = model(batch).loss
        print(saved.activations)

    Args:
        model: whose parameters and buffers are counted apart; autograd refers to them without costing a byte.
        note: called for every saved tensor; ``notes`` has what it returned.
    """

    def __init__(self, model: nn.Module | None = None, *, note: Callable[[], Any] | None = None) -> None:
        if model is not None:
            check_model(model)
        self._model = model
        self._note = note
        self._notes: WeakKeyDictionary[Held, Any] = WeakKeyDictionary()
        self._claims: Counter[int] = Counter()  # storage -> how many saved tensors hold it
        self._own_at_entry: frozenset[int] = frozenset()
        self._now = self._most = 0
        self._stack = ExitStack()

    def __enter__(self) -> saved_memory:
        self._own_at_entry = frozenset(self._own())
        self._stack.enter_context(watch_saved_tensors(Watcher(self._saved, lambda held: None)))
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stack.close()

    @property
    def notes(self) -> list[tuple[Held, Any]]:
        """List what is held now, one item for each saved tensor in the order of saving, with its note."""
        return list(self._notes.items())

    @property
    def activations(self) -> int:
        """Return the bytes held now that are not the model's own."""
        own = self._own()
        return sum(size for key, size in self._sizes().items() if key not in own)

    @property
    def most_activations(self) -> int:
        """Return the most bytes held at any time so far that were not the model's own."""
        return self._most

    @property
    def parameters(self) -> int:
        """Return the bytes held now of the model's parameters and buffers."""
        own = self._own()
        return sum(size for key, size in self._sizes().items() if key in own)

    @property
    def by_device(self) -> dict[str, int]:
        """Return type of device -> bytes of the activations held there now: hooks may move them to the CPU."""
        own = self._own()
        tensors = [tensor for held, _ in self.notes for tensor in held.tensors]
        devices = dict.fromkeys(tensor.device.type for tensor in tensors)
        held = {device: sizes(tensor for tensor in tensors if tensor.device.type == device) for device in devices}
        return {device: sum(size for key, size in of.items() if key not in own) for device, of in held.items()}

    @property
    def total(self) -> int:
        """Return all bytes held now."""
        return sum(self._sizes().values())

    def __repr__(self) -> str:
        return f"saved_memory(activations={self.activations}, parameters={self.parameters})"

    def _saved(self, held: Held) -> None:
        self._notes[held] = self._note() if self._note else None
        for key, size in sizes(held.tensors).items():
            if key not in self._own_at_entry:
                self._claim(held, key, size)

    def _claim(self, held: Held, key: int, size: int) -> None:
        if not self._claims[key]:
            self._now += size
            self._most = max(self._most, self._now)
        self._claims[key] += 1
        finalize(held, self._release, key, size).atexit = False

    def _release(self, key: int, size: int) -> None:
        self._claims[key] -= 1
        if not self._claims[key]:
            del self._claims[key]
            self._now -= size

    def _sizes(self) -> dict[int, int]:
        return sizes(tensor for held, _ in self.notes for tensor in held.tensors)

    def _own(self) -> dict[int, int]:
        return {} if self._model is None else sizes(model_tensors(self._model))

"""saved_memory: the bytes that autograd really holds for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any
from weakref import WeakSet, finalize

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..tensor_storages import model_tensors, sizes
from ..torch_private import version_of


class Held:
    """One saved tensor, owned by the autograd node that saved it and by nothing else: it dies with the node's claim."""

    __slots__ = ("__weakref__", "_version", "note", "tensor")

    def __init__(self, tensor: Tensor, note: Any) -> None:
        # An output still has its grad_fn, which owns this object: undetached, neither would ever be freed. What has
        # none stays the very object that was saved, since others may hold weak references to it.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.note = note
        self._version = None if tensor.is_inference() else version_of(tensor)

    def release(self) -> Tensor:
        """Return the tensor as autograd does: not if it was changed since."""
        if self._version is not None and version_of(self.tensor) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{self.tensor.type()} of shape {tuple(self.tensor.shape)} is at version {version_of(self.tensor)}, "
                f"expected version {self._version}"
            )
        return self.tensor


class saved_memory:  # noqa: N801 (a context manager, used as a verb)
    """Count what autograd holds for backward of everything computed inside, each storage once.

    The figures stay live after the block: they fall to zero as backward, or a dropped graph, lets the tensors go.
    Tensors packed by other hooks inside (checkpointing, offloading) are theirs, not held as they are, and not counted.

        with saved_memory(model) as saved:
            loss = model(batch).loss
        print(saved.activations)

    Args:
        model: whose parameters and buffers are counted apart; autograd refers to them without costing a byte.
        note: called for every saved tensor; what it returns is kept beside it in ``held``.
    """

    def __init__(self, model: nn.Module | None = None, *, note: Callable[[], Any] | None = None) -> None:
        self._model = model
        self._note = note
        self._held: WeakSet[Held] = WeakSet()
        self._claims: Counter[int] = Counter()  # storage -> how many saved tensors hold it
        self._own_at_entry: frozenset[int] = frozenset()
        self._now = self._most = 0
        self._hooks = saved_tensors_hooks(self._pack, Held.release)

    def __enter__(self) -> saved_memory:
        self._own_at_entry = frozenset(self._own())
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._hooks.__exit__(*error)

    @property
    def held(self) -> list[Held]:
        """List what is held now, one item for each saved tensor."""
        return list(self._held)

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
    def total(self) -> int:
        """Return all bytes held now."""
        return sum(self._sizes().values())

    def __repr__(self) -> str:
        return f"saved_memory(activations={self.activations}, parameters={self.parameters})"

    def _pack(self, tensor: Tensor) -> Held:
        held = Held(tensor, self._note() if self._note else None)
        self._held.add(held)
        for key, size in sizes([tensor]).items():
            if key not in self._own_at_entry:
                self._claim(held, key, size)
        return held

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
        return sizes(held.tensor for held in self._held)

    def _own(self) -> dict[int, int]:
        return {} if self._model is None else sizes(model_tensors(self._model))

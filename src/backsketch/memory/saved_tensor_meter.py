"""The meter: see every tensor that is saved for backward, and what is kept of it, by autograd or by hooks.

Torch runs the innermost hooks on saved tensors and no others. So the meter runs the hooks it is entered inside of, and
watches those that are entered inside of it: what they do is what they would do without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..saved_as_it_is import SavedAsItIs
from ..tensor_storages import sizes, tensors_within
from ..torch_private import Hooks, innermost_hooks, replacing_hooks


class Held:
    """What hooks keep of one saved tensor, owned by the autograd node that saved it: it dies with the node's claim."""

    __slots__ = ("__weakref__", "_unpack", "dtype", "kept", "replaced", "shape")

    def __init__(self, tensor: Tensor, hooks: Hooks) -> None:
        pack, self._unpack = hooks
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.kept: Any = pack(tensor)
        self.replaced = not sizes([tensor]).keys() <= sizes(self.tensors).keys()

    @property
    def tensors(self) -> list[Tensor]:
        """List the tensors that are kept now; a hook may let go of them, as a checkpoint does."""
        kept = self.kept
        return [kept.kept] if type(kept) is SavedAsItIs else list(tensors_within(kept))  # most are

    def release(self) -> Tensor:
        """Return the tensor that was saved, or what its hooks give for it."""
        return self._unpack(self.kept)


@dataclass(frozen=True, slots=True)
class Watcher:
    """Whom to tell: ``saved`` of every tensor when it is saved, ``unpacked`` when backward has asked for it."""

    saved: Callable[[Held], None]
    unpacked: Callable[[Held], None]


@contextmanager
def watch_saved_tensors(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher`` of every tensor that is saved inside the block, also under other hooks and other watchers.

    Before torch 2.8 the hooks of an outer block cannot be asked for: there they rest while the meter runs.
    """
    outer = innermost_hooks()
    hooks, watchers = outer, _watchers_of(outer)
    if outer is not None and isinstance(outer[0], _Pack):
        hooks = outer[0].hooks
    with replacing_hooks(_under_the_watchers), saved_tensors_hooks(*_watched(hooks, (*watchers, watcher))):
        yield


class _Pack:
    """Pack a tensor as ``hooks`` do, or keep it as it is without any, and tell the watchers."""

    def __init__(self, hooks: Hooks | None, watchers: tuple[Watcher, ...]) -> None:
        self.hooks = hooks
        self.watchers = watchers
        if hooks is not None:
            update_wrapper(self, hooks[0], updated=())  # hooks are known by their module, checkpointing for one

    def __call__(self, tensor: Tensor) -> Held:
        held = Held(tensor, self.hooks or _AS_IT_IS)
        for watcher in self.watchers:
            watcher.saved(held)
        return held

    def unpack(self, held: Held) -> Tensor:
        tensor = held.release()
        for watcher in self.watchers:
            watcher.unpacked(held)
        return tensor


def _watched(hooks: Hooks | None, watchers: tuple[Watcher, ...]) -> Hooks:
    pack = _Pack(hooks, watchers)
    return pack, pack.unpack


def _under_the_watchers(hooks: Hooks) -> Hooks:
    """Return hooks that are entered now so that whoever watches this thread sees what they keep."""
    watchers = _watchers_of(innermost_hooks())
    return _watched(hooks, watchers) if watchers and not isinstance(hooks[0], _Pack) else hooks


def _watchers_of(hooks: Hooks | None) -> tuple[Watcher, ...]:
    return hooks[0].watchers if hooks is not None and isinstance(hooks[0], _Pack) else ()


_AS_IT_IS: Hooks = SavedAsItIs.of, SavedAsItIs.unpack

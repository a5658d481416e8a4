"""One sketch per input: layers that read the same tensor with the same config keep it once between them.

A memo from input to what was kept of it. It owns nothing: the kept tensors live exactly as long as autograd holds them
for some layer, and an entry whose tensors are gone counts as absent. Each thread has its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

Kept = tuple[Tensor, ...]


class _Memo(threading.local):
    """What this thread has kept and autograd still holds, by input."""

    def __init__(self) -> None:
        self.entries: dict[Hashable, _Entry] = {}


class _Entry:
    """Weak references to an input's storage and to what was kept of it."""

    __slots__ = ("kept", "storage")

    def __init__(self, storage: torch.UntypedStorage, kept: Kept, forget: Callable[[object], object]) -> None:
        self.storage = weakref.ref(storage)
        self.kept = [weakref.ref(tensor, forget) for tensor in kept]

    def get(self, storage: torch.UntypedStorage) -> Kept | None:
        """Return what was kept, unless some of it is gone or the address is that of another storage by now."""
        if self.storage() is not storage:
            return None
        kept = [reference() for reference in self.kept]
        return None if any(tensor is None for tensor in kept) else tuple(kept)  # type: ignore[arg-type]


_memo = _Memo()


def shared(x: Tensor, purpose: Hashable, keep: Callable[[], Kept]) -> Kept:
    """Return what another layer kept of this very tensor for the same purpose, or else ``keep()``."""
    # An inference tensor does not count its changes.
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x) or x.is_inference():
        return keep()
    entries, storage = _memo.entries, x.untyped_storage()
    key = (identity(x), purpose)
    if (entry := entries.get(key)) is not None and (kept := entry.get(storage)) is not None:
        return kept
    kept = keep()
    entries[key] = _Entry(storage, kept, lambda _: entries.pop(key, None))
    return kept


def identity(x: Tensor) -> Hashable:
    """Return what two tensors have in common that are one: memory, shape, strides, sign, and that it is unchanged.

    In-place changes count up a tensor's version. It holds for as long as the storage lives.
    """
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), x._version

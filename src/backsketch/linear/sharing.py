"""One sketch per input: layers that read the same tensor with the same config keep it once between them.

A memo from input to what was kept of it. It owns nothing: the kept tensors live exactly as long as autograd holds them
for some layer, and an entry whose tensors are gone counts as absent. Each layer takes an entry once: if it runs again,
the memory may have been filled anew without PyTorch being told. Each thread has its own memo.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from functools import lru_cache

import torch
from torch import Tensor

from ..torch_private import memory_id, producer_of, transforms_active, version_of

Kept = tuple[Tensor, ...]

_PROBED_VALUES = 64
_GOLDEN = 0.6180339887498949


class _Memo(threading.local):
    """What this thread has kept and autograd still holds, by input."""

    def __init__(self) -> None:
        self.entries: dict[Hashable, _Entry] = {}


class _Entry:
    """Weak references to an input's storage and to what was kept of it, and which layers have taken it."""

    __slots__ = ("__weakref__", "kept", "probe", "readers", "storage")

    def __init__(self, x: Tensor, kept: Kept, reader: Hashable, forget: Callable[[_Entry], object]) -> None:
        owner = weakref.ref(self)

        def gone(_: object) -> None:
            if (entry := owner()) is not None:
                forget(entry)

        self.storage = weakref.ref(x.untyped_storage())
        self.kept = [weakref.ref(tensor, gone) for tensor in kept]
        self.probe = _probe(x)
        self.readers = {reader}

    def take(self, x: Tensor, reader: Hashable) -> Kept | None:
        """Return what was kept, for a layer that has not taken it; None if it is gone or the memory has changed."""
        if (
            reader in self.readers
            or self.storage() is not x.untyped_storage()
            or not _same_probe(self.probe, _probe(x))
        ):
            return None
        kept = [reference() for reference in self.kept]
        if any(tensor is None for tensor in kept):
            return None
        self.readers.add(reader)
        return tuple(kept)  # type: ignore[arg-type]


_memo = _Memo()


def shared(x: Tensor, purpose: Hashable, reader: Hashable, keep: Callable[[], Kept]) -> Kept:
    """Return what another layer than ``reader`` kept of this very tensor for the same purpose, or else ``keep()``."""
    # An inference tensor does not count its changes.
    if torch.compiler.is_compiling() or transforms_active() or x.is_inference():
        return keep()
    entries = _memo.entries
    key = (identity(x), purpose)
    if (entry := entries.get(key)) is not None and (kept := entry.take(x, reader)) is not None:
        return kept
    kept = keep()

    def forget(entry: _Entry) -> None:
        if entries.get(key) is entry:
            del entries[key]

    entries[key] = _Entry(x, kept, reader, forget)
    return kept


def identity(x: Tensor) -> Hashable:
    """Return a key that is equal only for tensors that view the same memory in the same way at the same version.

    In-place changes count up a tensor's version. The key is of use for as long as the storage lives.
    """
    return memory_id(x), x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), version_of(x)


def _probe(x: Tensor) -> Tensor | None:
    """Return a sum and some values of a tensor on the CPU whose memory no operation of autograd made; else None.

    Such memory may be shared with NumPy or another process, which fill it again without counting up its version.
    """
    if not x.is_cpu or not x.numel() or producer_of(x) is not None:
        return None
    x = x.detach()
    return torch.cat((x.sum(dtype=torch.float64).view(1), x[_scattered(x.shape)].to(torch.float64)))


def _same_probe(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


@lru_cache(maxsize=64)
def _scattered(shape: torch.Size) -> tuple[Tensor, ...]:
    """Return the indices of some values, scattered over all dimensions of a tensor."""
    count = shape.numel()
    places = torch.arange(_PROBED_VALUES, device="cpu") * int(count * _GOLDEN) % count
    return torch.unravel_index(places, shape)

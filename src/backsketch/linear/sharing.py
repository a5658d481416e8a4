"""One sketch per input: layers that read the same tensor with the same config keep it once between them.

A memo maps an input to what was kept of it. It holds weak references only: kept tensors live as long as autograd needs
them for some layer, and an entry whose tensors are gone counts as absent. A layer takes an entry only once: when the
layer runs again, code outside PyTorch may have overwritten the input. Each thread has its own memo.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ..config import SketchConfig
from ..masks.checkpoint_masks import valid_for
from ..numerics import as_rows
from ..torch_private import memory_id, producer_of, transforms_active, version_of
from .checksum import checksum
from .keeping import keep

Kept = tuple[Tensor, ...]


def keep_or_share(
    source: Tensor, x: Tensor, seed: Tensor, reader: int, config: SketchConfig
) -> tuple[Tensor | None, Kept]:
    """Return the mask of valid rows, (rows,) or None for all, and what the layer ``reader`` keeps of x.

    Args:
        source: the tensor that the layer was called with; x: the same tensor after autocast.
        reader: a number that identifies the layer.
    """
    valid = valid_for(x, seed)
    purpose = (config.as_json, x.dtype, id(valid))  # a string knows its hash
    return valid, shared(source, purpose, reader, lambda: keep(as_rows(x), config, seed, valid))


class _Memo(threading.local):
    """Input -> what this thread has kept of it, while autograd still holds that."""

    def __init__(self) -> None:
        self.entries: dict[Hashable, _Entry] = {}


class _Entry:
    """Weak references to an input's storage and to what was kept of it, and the layers that have taken it."""

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
        """Return what was kept; None if this layer has taken it before, it is gone, or the input has changed."""
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


def shared(x: Tensor, purpose: Hashable, reader: Hashable, make: Callable[[], Kept]) -> Kept:
    """Return what a layer other than ``reader`` has kept of this tensor for the same purpose, or else ``make()``."""
    # An inference tensor has no version, so an in-place change would go unnoticed.
    if torch.compiler.is_compiling() or transforms_active() or x.is_inference():
        return make()
    entries = _memo.entries
    key = (identity(x), purpose)
    if (entry := entries.get(key)) is not None and (kept := entry.take(x, reader)) is not None:
        return kept
    kept = make()

    def forget(entry: _Entry) -> None:
        if entries.get(key) is entry:
            del entries[key]

    entries[key] = _Entry(x, kept, reader, forget)
    return kept


def identity(x: Tensor) -> Hashable:
    """Return a key that is equal only for tensors that view the same memory in the same way at the same version.

    Every in-place change raises a tensor's version. The key is valid only as long as the storage lives.
    """
    return memory_id(x), x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), version_of(x)


def _probe(x: Tensor) -> Tensor | None:
    """Return a checksum of a CPU tensor that no autograd operation made, and None for any other tensor.

    NumPy or another process may share such memory and overwrite it without raising the tensor's version.
    """
    if not x.is_cpu or not x.numel() or producer_of(x) is not None:
        return None
    return checksum(x.detach())


def _same_probe(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)

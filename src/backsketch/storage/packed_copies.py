"""Which memory has a packed copy now, so that several operations that save one tensor keep one copy of it.

A memo of each thread maps memory to its copies. It holds weak references only: a copy lives as long as autograd needs
it for some operation.

Code outside PyTorch may overwrite memory that no operation of autograd made, such as a buffer for batches, and no
version tells of it. A copy of such memory serves only until the forward pass in which it was made ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable

import torch
from torch import Tensor

from ..torch_private import memory_id, producer_of, version_of
from .memory_rows import MemoryRows
from .packed_tensor import PackedMemory, PackedTensor


class _Memo(threading.local):
    def __init__(self) -> None:
        self.copies: dict[Hashable, _Copies] = {}
        self.passes = 0


class _Copies:
    """The packed copies of one piece of memory."""

    __slots__ = ("packed", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = weakref.ref(storage)
        self.packed: list[weakref.ref[PackedMemory]] = []


_memo = _Memo()


def packed_copy(tensor: Tensor, least_bits: int = 1) -> PackedTensor | None:
    """Return a packed copy of a tensor as it is now, with at least so many bits, or None if there is none."""
    if not _memo.copies or (rows := MemoryRows.of(tensor)) is None or tensor.is_inference():
        return None
    copies = _memo.copies.get(_key(tensor, rows))
    if copies is None or copies.storage() is not tensor.untyped_storage():
        return None
    for reference in copies.packed:
        memory = reference()
        if memory is not None and memory.bits >= least_bits:
            return PackedTensor(memory, tensor.shape, tensor.stride())
    return None


def remember_copy(tensor: Tensor, rows: MemoryRows, memory: PackedMemory) -> None:
    """Let later operations that save the same memory find its packed copy."""
    copies, key, storage = _memo.copies, _key(tensor, rows), tensor.untyped_storage()
    entry = copies.get(key)
    if entry is None or entry.storage() is not storage:
        entry = copies[key] = _Copies(storage)

    def forget(reference: weakref.ref[PackedMemory]) -> None:
        entry.packed.remove(reference)
        if not entry.packed and copies.get(key) is entry:
            del copies[key]

    entry.packed.append(weakref.ref(memory, forget))


def begin_or_end_pass() -> None:
    """Take note that a forward pass begins or ends in this thread."""
    _memo.passes += 1


def _key(tensor: Tensor, rows: MemoryRows) -> Hashable:
    """Return a key that is equal only for views of the same values; valid as long as their storage lives."""
    told = version_of(tensor), _memo.passes if producer_of(tensor) is None else None
    return memory_id(tensor), tensor.storage_offset(), rows, tensor.dtype, tensor.is_neg(), told

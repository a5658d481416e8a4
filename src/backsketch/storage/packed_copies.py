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
from dataclasses import replace

import torch
from torch import Tensor

from ..torch_private import memory_id, producer_of, version_of
from .memory_rows import MemoryRows
from .packed_tensor import PackedMemory, PackedTensor
from .scaled_memory import Recipe


class _Memo(threading.local):
    def __init__(self) -> None:
        self.copies: dict[Hashable, _Copies] = {}
        self.passes = 0


class _Copies:
    """The packed copies of one piece of memory."""

    __slots__ = ("packed", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = weakref.ref(storage)
        self.packed: dict[weakref.ref[PackedMemory], Recipe | None] = {}  # None: it is a copy of this memory itself


_memo = _Memo()


def packed_copy(tensor: Tensor, least_bits: int = 1) -> PackedTensor | None:
    """Return a packed copy of a tensor as it is now, with at least so many bits, or None if there is none."""
    if not _memo.copies or (rows := MemoryRows.of(tensor)) is None or tensor.is_inference():
        return None
    for memory, recipe in _copies_of(tensor, rows):
        if memory.bits >= least_bits:
            return PackedTensor(recipe.applied_to(memory) if recipe else memory, tensor.shape, tensor.stride())
    return None


def remember_copy(tensor: Tensor, rows: MemoryRows, memory: PackedMemory, recipe: Recipe | None = None) -> None:
    """Let later operations that save the same memory find its packed copy, or a recipe to make it from one."""
    copies, key, storage = _memo.copies, _key(tensor, rows), tensor.untyped_storage()
    entry = copies.get(key)
    if entry is None or entry.storage() is not storage:
        entry = copies[key] = _Copies(storage)

    def forget(reference: weakref.ref[PackedMemory]) -> None:
        del entry.packed[reference]
        if not entry.packed and copies.get(key) is entry:
            del copies[key]

    entry.packed[weakref.ref(memory, forget)] = recipe


def remember_product(x: Tensor, factor: Tensor, product: Tensor, least_bits: int) -> None:
    """Let operations that save x · factor make it again from a copy of x with at least so many bits, if x has one."""
    copy, rows = packed_copy(x, least_bits), MemoryRows.of(product)
    if copy is not None and rows is not None and (recipe := Recipe.of_product(copy, factor, product)) is not None:
        remember_copy(product, rows, copy.memory, recipe)


def remember_cast(x: Tensor, cast: Tensor) -> None:
    """Let operations that save a cast of x make it again as they make x, if there is a recipe for x."""
    if not _memo.copies or (rows := MemoryRows.of(x)) is None or x.is_inference():
        return
    if cast.stride() != x.stride() or cast.device != x.device:
        return
    for memory, recipe in _copies_of(x, rows):
        if recipe is not None:
            remember_copy(cast, rows, memory, replace(recipe, casts=(*recipe.casts, cast.dtype)))


def _copies_of(tensor: Tensor, rows: MemoryRows) -> list[tuple[PackedMemory, Recipe | None]]:
    """List the copies of the memory of a tensor as it is now that live, and recipes."""
    entry = _memo.copies.get(_key(tensor, rows))
    if entry is None or entry.storage() is not tensor.untyped_storage():
        return []
    alive = ((reference(), recipe) for reference, recipe in tuple(entry.packed.items()))
    return [(memory, recipe) for memory, recipe in alive if memory is not None]


def begin_or_end_pass() -> None:
    """Take note that a forward pass begins or ends in this thread."""
    _memo.passes += 1


def _key(tensor: Tensor, rows: MemoryRows) -> Hashable:
    """Return a key that is equal only for views of the same values; valid as long as their storage lives."""
    told = version_of(tensor), _memo.passes if producer_of(tensor) is None else None
    return memory_id(tensor), tensor.storage_offset(), rows, tensor.dtype, tensor.is_neg(), told

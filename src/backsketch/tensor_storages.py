"""The storages behind tensors: memory is counted by storage, since many tensors may share one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .torch_private import is_traceable_wrapper_subclass, storage_id, tree_leaves


def storages(tensor: Tensor) -> Iterable[torch.UntypedStorage]:
    """Return every storage behind ``tensor``: one for a plain tensor, more for a sparse or quantised one."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:  # most are, and this is asked for each operation
        return (tensor.untyped_storage(),)
    return _storages_within(tensor)


def _storages_within(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        yield from chain.from_iterable(storages(part) for part in parts if isinstance(part, Tensor))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    else:
        yield from chain.from_iterable(storages(getattr(tensor, name)()) for name in _PARTS[tensor.layout])


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that no other living storage has; data pointers do not do, as all empty and meta ones are 0."""
    return storage_id(storage)


def sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return key -> bytes for every storage behind ``tensors``."""
    return {storage_key(storage): storage.nbytes() for tensor in tensors for storage in storages(tensor)}


def model_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of ``model``."""
    return chain(model.parameters(), model.buffers())


def tensors_of(tree: Any) -> list[Tensor]:
    """List the tensors in containers, as the arguments of operations are, in order."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    """Add the tensors in a tree; most are short tuples, for which torch's own walk takes longer than the operation."""
    if isinstance(tree, Tensor):
        found.append(tree)
    elif type(tree) in (tuple, list):
        for each in tree:
            _collect(each, found)
    elif type(tree) is dict:
        for each in tree.values():
            _collect(each, found)
    elif tree is not None and not isinstance(tree, (int, float, str)):
        found.extend(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``value``: in containers and dataclasses at any depth, in other objects one level deep.

    What the attributes of an object refer to in turn is not taken for its own.
    """
    for leaf in _leaves(value, set()):
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            yield from (each for each in _leaves(_attributes(leaf), set()) if isinstance(each, Tensor))


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    for leaf in tree_leaves(value):
        if not is_dataclass(leaf):
            yield leaf
        elif id(leaf) not in seen:  # dataclasses may refer to each other
            seen.add(id(leaf))
            yield from _leaves([getattr(leaf, each.name, None) for each in fields(leaf)], seen)


def _attributes(value: Any) -> list[Any]:
    slots = chain.from_iterable(vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


_PLAIN = (Tensor, nn.Parameter)
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}

"""The storages behind tensors: memory is counted by storage, since many tensors may share one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from .torch_private import is_traceable_wrapper_subclass, storage_id


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield every storage behind ``tensor``: one for a plain tensor, more for a sparse or quantised one."""
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


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}

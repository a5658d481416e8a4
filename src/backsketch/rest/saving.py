"""SavingStep: one forward pass, in which the running operation decides how what it saves for backward is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ..random_words import Seed
from ..saved_as_it_is import SavedAsItIs
from ..seeds import draw_seed, is_capturing, seed_value
from ..storage.memory_rows import MemoryRows
from ..storage.packed_copies import packed_copy, remember_copy
from ..storage.packed_tensor import PackedMemory, PackedTensor, rows_in_memory
from ..torch_private import Hooks
from .offloaded import Offloaded, OffloadedMemory
from .rest_config import RestConfig

_SEED_STRIDE = 0x9E3779B97F4A7C15 & (2**63 - 1)  # odd, so that no two tensors of a step have one seed


class Kept(Protocol):
    """What is kept of a saved tensor."""

    def unpack(self) -> Tensor: ...


Keep: TypeAlias = Callable[[Tensor], Kept | None]  # None: keep the tensor as it is


class Observer(Protocol):
    """Whom to tell what becomes of each saved tensor: its family, "" for none, and what is kept, None for itself."""

    def __call__(self, family: str, tensor: Tensor, kept: object) -> None: ...


class SavingStep:
    """What one forward pass keeps. ``pack`` and ``unpack`` are its hooks on saved tensors.

    ``outer`` are the hooks around the pass, for which its own stand: they get what it keeps, as ``save_on_cpu`` does.
    """

    def __init__(self, config: RestConfig, outer: Hooks | None) -> None:
        self.config = config
        self.outer = outer
        self._keep: Keep | None = None
        self._family: str | None = ""
        self._seed = int(draw_seed())
        self._drawn = 0

    def run(
        self,
        family: str | None,
        keep: Keep | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call an operation, and let ``keep`` decide how the tensors that it saves are kept.

        Without a family, the operation packs by itself, and tells of it.
        """
        before = self._keep, self._family
        self._keep, self._family = keep, family
        try:
            return function(*args, **kwargs)
        finally:
            self._keep, self._family = before

    def pack(self, tensor: Tensor) -> Any:
        """Return what is kept of a tensor that an operation saves."""
        kept = None
        if self._keep is not None and is_plain(tensor) and tensor.numel() >= self.config.min_elements:
            kept = self._keep(tensor)
        if self._family is not None:
            self.tell(self._family, tensor, kept)
        if self.outer is not None and not getattr(kept, "offloaded", False):
            return Offloaded.of(tensor, kept, self.outer)
        return SavedAsItIs.of(tensor) if kept is None else kept

    def tell(self, family: str, tensor: Tensor, kept: object) -> None:
        """Tell whoever observes this thread what is kept of a saved tensor."""
        if (observer := _observing.observer) is not None:
            observer(family, tensor, kept)

    @staticmethod
    def unpack(kept: Kept) -> Tensor:
        """Return the tensor that was saved, or what few bits tell of it."""
        return kept.unpack()

    def few_bits(
        self,
        tensor: Tensor,
        bits: int | None,
        *,
        rotated: bool = False,
        centred: bool = False,
        shared: bool = True,
    ) -> Kept | None:
        """Keep a tensor in few bits, or return None where ``bits`` is None; one copy serves all that share it.

        ``centred`` keeps the mean of its rows apart, where there are enough of them.
        """
        if bits is None or bits >= 8 * tensor.itemsize:
            return None
        if shared and (copy := packed_copy(tensor, bits)) is not None:
            return copy
        if shared and MemoryRows.of(tensor) is None and tensor.untyped_storage().nbytes() * 8 <= tensor.numel() * bits:
            return None  # windows that overlap, of less memory than a copy of them
        plain = tensor.detach().resolve_neg()
        dense, rows = rows_in_memory(plain)
        columns = rows.by_column(dense) if centred else None
        packed_rows = (columns or rows).view(dense)
        memory = PackedMemory.of(packed_rows, bits, rotated, self.seed(tensor.device), centred=columns is not None)
        if shared and dense.untyped_storage() is tensor.untyped_storage() and not tensor.is_inference():
            if self.outer is not None:
                memory = OffloadedMemory.of_packed(memory, self.outer)
            remember_copy(tensor, rows, memory)
        return PackedTensor(memory, dense.shape, dense.stride())

    def own_copy(self, family: str, tensor: Tensor, bits: int | None) -> PackedTensor:
        """Pack a tensor for a Function that saves the packed tensors by itself, and tell of it; nobody shares them."""
        packed = self.few_bits(tensor, bits, shared=False)
        assert isinstance(packed, PackedTensor)
        self.tell(family, tensor, packed)
        return packed

    def seed(self, device: torch.device) -> Seed:
        """Return another seed for each tensor, of one random number a step."""
        if is_capturing(device):
            return seed_value(draw_seed(device))
        self._drawn += 1
        return (self._seed + self._drawn * _SEED_STRIDE) % 2**63


def is_plain(tensor: object) -> bool:
    """Tell whether something is a tensor with plain memory: no parameter or other subclass, not sparse, not nested."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


class _Observing(threading.local):
    observer: Observer | None = None


_observing = _Observing()


class observe_saving:  # noqa: N801 (a context manager, used as a verb)
    """Inside the block, tell ``observer`` what becomes of each tensor that a step in this thread saves."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __enter__(self) -> None:
        self._before, _observing.observer = _observing.observer, self._observer

    def __exit__(self, *error: object) -> None:
        _observing.observer = self._before

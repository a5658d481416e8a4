"""Whether the operation that made a tensor keeps it for its own backward: then to keep it as well costs nothing.

Attention, ReLU, tanh, sigmoid and softmax save their output. A linear layer that reads it, also through a view, may
keep the very same memory, and its gradient is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor

_SAVED = "_raw_saved_"
_OUTPUTS = tuple(_SAVED + name for name in ("result", "output", "out"))


def held_by_producer(x: Tensor) -> bool:
    """Tell whether the operation that made ``x`` has saved the memory behind it, unpacked, for backward."""
    storage = x.untyped_storage()._cdata
    return any(saved.untyped_storage()._cdata == storage for saved in _saved_tensors(producer_of(x)))


def saved_by_producer(x: Tensor) -> bool:
    """Tell whether the operation that made ``x`` saves its output, whatever hooks make of it.

    Inside a checkpointed region, where the two passes must decide alike: in the first one nothing is held.
    """
    node = producer_of(x)
    return node is not None and any(hasattr(node, name) for name in _OUTPUTS)


def producer_of(x: Tensor) -> Any:
    """Return the graph node of the operation that made the memory behind ``x``."""
    base = x._base if x._is_view() else x
    return None if base is None else base.grad_fn


def _saved_tensors(node: Any) -> Iterator[Tensor]:
    """Yield what a node holds as it is. What a hook packed is not touched: unpacking may compute or copy."""
    kind: Any = type(node)
    for name in _saved_names(kind):
        try:
            saved = getattr(node, name)
        except RuntimeError:  # freed by an earlier backward
            continue
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            data = getattr(each, "data", None)  # torch 2.6 does not show it
            data = getattr(data, "tensor", data)  # what saved_memory and peak_memory hold for the node
            if isinstance(data, Tensor):
                yield data


@lru_cache(maxsize=1024)
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_SAVED))

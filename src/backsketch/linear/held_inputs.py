"""Find inputs that the operation before saves for its own backward anyway, so that keeping them costs nothing.

Attention, ReLU, tanh, sigmoid and softmax save their output. A linear layer that reads it, directly or through a view,
can keep the same memory, and its gradient is exact.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..torch_private import memory_id, producer_of, saved_by, saves_its_output


def held_by_producer(x: Tensor) -> bool:
    """Tell whether the operation that made ``x`` holds the memory of ``x`` for backward."""
    memory = memory_id(x)
    held = map(_unwrapped, saved_by(producer_of(x)))
    return any(isinstance(tensor, Tensor) and memory_id(tensor) == memory for tensor in held)


def _unwrapped(saved: Any) -> Any:
    """Return a saved tensor without the wrappers of hooks, each of which has the original as ``kept``."""
    while hasattr(saved, "kept"):
        saved = saved.kept
    return saved


def saved_by_producer(x: Tensor) -> bool:
    """Tell whether the operation that made ``x`` is of a kind that saves its output for backward.

    For use inside checkpoints: their first pass holds nothing, and both passes must give the same answer.
    """
    return saves_its_output(producer_of(x))

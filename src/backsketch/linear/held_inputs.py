"""Whether the operation that made a tensor keeps it for its own backward: then to keep it as well costs nothing.

Attention, ReLU, tanh, sigmoid and softmax save their output. A linear layer that reads it, also through a view, may
keep the very same memory, and its gradient is exact.
"""

from __future__ import annotations

from torch import Tensor

from ..torch_private import memory_id, producer_of, saved_by, saves_its_output


def held_by_producer(x: Tensor) -> bool:
    """Tell whether the operation that made ``x`` has saved the memory behind it, unpacked, for backward.

    saved_memory and peak_memory wrap what is saved; it is in their ``kept``.
    """
    memory = memory_id(x)
    held = (getattr(saved, "kept", saved) for saved in saved_by(producer_of(x)))
    return any(isinstance(tensor, Tensor) and memory_id(tensor) == memory for tensor in held)


def saved_by_producer(x: Tensor) -> bool:
    """Tell whether the operation that made ``x`` saves its output, whatever hooks make of it.

    For use inside checkpoints: in their first pass nothing is held, and both passes must decide the same.
    """
    return saves_its_output(producer_of(x))

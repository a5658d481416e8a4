"""What an optimiser keeps for each parameter between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_STEP = 4  # bytes of the number of steps that fused AdamW keeps beside each parameter


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """An optimiser's name, what it keeps in words, and its bytes for one parameter: (number of values, dtype)."""

    name: str
    words: str
    size: Callable[[int, torch.dtype], int]


def states_of(optimizer: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of an optimiser's states for one parameter."""
    return OPTIMIZERS[optimizer].size(prod(shape), dtype)


def states_of_all(optimizer: str, parameters: Iterable[Tensor]) -> int:
    """Return the bytes of an optimiser's states for those of the parameters that train."""
    return sum(states_of(optimizer, tuple(each.shape), each.dtype) for each in parameters if each.requires_grad)


def check_optimizer(optimizer: object) -> str:
    """Return the name of an optimiser, or raise an error that names those that are known."""
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    return optimizer


def _adamw(count: int, dtype: torch.dtype) -> int:
    """torch.optim.AdamW: two means in the type of the parameter, and the step."""
    return 2 * count * dtype.itemsize + _STEP


def _adamw8bit(count: int, dtype: torch.dtype) -> int:
    """bitsandbytes' AdamW8bit: two means in a byte each, with a float32 for every 256; in float32 below 4096 values."""
    return 2 * count * 4 if count < 4096 else 2 * (count + 4 * -(-count // 256))


def _sgd(count: int, dtype: torch.dtype) -> int:
    """torch.optim.SGD without momentum."""
    return 0


OPTIMIZERS = {
    "adamw": OptimizerStates("AdamW", "two states as large as the parameters", _adamw),
    "adamw8bit": OptimizerStates(
        "8-bit AdamW",
        "two states of one byte a parameter, and one fp32 scale for each 256 of them; of fp32 below 4,096 values",
        _adamw8bit,
    ),
    "sgd": OptimizerStates("SGD", "no states, without momentum", _sgd),
}

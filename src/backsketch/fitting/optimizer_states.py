"""What an optimiser keeps for each parameter between steps."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

_STEP = 4  # bytes of the number of steps that fused AdamW keeps beside each parameter


def states_of(optimizer: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of an optimiser's states for one parameter."""
    return OPTIMIZERS[optimizer](prod(shape), dtype)


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


OPTIMIZERS: dict[str, Callable[[int, torch.dtype], int]] = {"adamw": _adamw, "adamw8bit": _adamw8bit, "sgd": _sgd}

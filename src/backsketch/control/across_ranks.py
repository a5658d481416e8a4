"""Sums over the processes of a distributed run, so that all of them decide alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed


def is_distributed() -> bool:
    """Tell whether several processes train together."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def summed(values: Sequence[float]) -> list[float]:
    """Return the sum of each value over all processes, which must all call this with as many; alone, the values."""
    return _reduced(values, "SUM")


def least(values: Sequence[float]) -> list[float]:
    """Return the least of each value over all processes, which must all call this with as many; alone, the values."""
    return _reduced(values, "MIN")


def _reduced(values: Sequence[float], operation: str) -> list[float]:
    if not is_distributed():
        return list(values)
    backend = distributed.get_backend()
    device = torch.accelerator.current_accelerator() if "nccl" in backend or "xccl" in backend else None
    total = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(total, getattr(distributed.ReduceOp, operation))
    result: list[float] = total.tolist()
    return result

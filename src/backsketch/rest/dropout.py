"""Dropout: one bit a value, exact, also where torch keeps its mask as floating-point numbers, as on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .packed_flags import PackedFlags
from .rules import Call, Rule
from .saving import Kept


@dataclass(frozen=True, slots=True)
class Dropout(Rule):
    """Keep one bit of each value of the mask."""

    def __call__(self, call: Call) -> Any:
        p = call.argument(1, "p", 0.5)
        return call.keeping("mask", lambda tensor: kept_mask(tensor, p))


def kept_mask(tensor: Tensor, p: float) -> Kept | None:
    """Keep a mask of dropout: flags, or the numbers 0 and 1 / (1 − p) that the input is multiplied by."""
    if tensor.dtype == torch.bool:
        return PackedFlags.of(tensor)
    if tensor.requires_grad or not tensor.is_floating_point() or not 0 < p < 1:
        return None
    return PackedFlags.of(tensor != 0, tensor.dtype, 0.0, _scale(tensor.dtype, p))


def is_mask(tensor: Tensor, p: float) -> bool:
    """Tell whether a tensor, which may be another constant, has only the values of a mask of dropout."""
    if not tensor.is_cpu or not tensor.is_floating_point() or not 0 < p < 1:
        return tensor.dtype == torch.bool  # accelerators keep flags, and asking for values would wait for them
    return bool(((tensor == 0) | (tensor == _scale(tensor.dtype, p))).all())


def _scale(dtype: torch.dtype, p: float) -> float:
    """Return 1 / (1 − p), rounded as torch rounds it."""
    return torch.ones((), dtype=dtype, device="cpu").div_(1 - p).item()

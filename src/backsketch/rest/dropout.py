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


def kept_mask(tensor: Tensor, p: float, *, sure: bool = True) -> Kept | None:
    """Keep a mask of dropout: flags, or the numbers 0 and 1 / (1 − p) that the input is multiplied by.

    Where it is not ``sure`` that floating-point numbers are a mask, they are kept as it if they have only the values of
    one. Accelerators keep flags, and asking them for values would wait for them.
    """
    if tensor.dtype == torch.bool:
        return PackedFlags.of(tensor)
    if tensor.requires_grad or not tensor.is_floating_point() or not 0 < p < 1 or not (sure or tensor.is_cpu):
        return None
    return PackedFlags.of_two_numbers(tensor, _scale(tensor.dtype, p))


def _scale(dtype: torch.dtype, p: float) -> float:
    """Return 1 / (1 − p), rounded as torch rounds it."""
    return torch.ones((), dtype=dtype, device="cpu").div_(1 - p).item()

"""Rademacher sketch: independent random signs."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import random_signs
from .iid import IidSketch


class Rademacher(IidSketch):
    """S with independent ±1/√dim entries."""

    __slots__ = ()

    kurtosis = 1

    @classmethod
    def entries(cls, count: int, generator: torch.Generator) -> Tensor:
        return random_signs(count, generator)

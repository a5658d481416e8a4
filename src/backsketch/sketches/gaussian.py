"""Gaussian sketch: independent normal entries (section 2.2 of the paper)."""

from __future__ import annotations

import torch
from torch import Tensor

from .iid import IidSketch


class Gaussian(IidSketch):
    """S with independent N(0, 1/dim) entries."""

    __slots__ = ()

    kurtosis = 3

    @classmethod
    def entries(cls, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, generator=generator, device=generator.device, dtype=torch.float32)

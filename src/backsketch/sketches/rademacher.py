"""Rademacher sketch: independent random signs."""

from __future__ import annotations

from torch import Tensor

from .draws import Draws
from .iid import IidSketch


class Rademacher(IidSketch):
    """S with independent ±1/√dim entries."""

    __slots__ = ()

    kurtosis = 1

    @classmethod
    def entries(cls, count: int, draws: Draws) -> Tensor:
        return draws.signs(count)

"""Gaussian sketch: independent normal entries (section 2.2 of the paper)."""

from __future__ import annotations

from torch import Tensor

from .draws import Draws
from .iid import IidSketch


class Gaussian(IidSketch):
    """S with independent N(0, 1/dim) entries."""

    __slots__ = ()

    kurtosis = 3

    @classmethod
    def entries(cls, count: int, draws: Draws) -> Tensor:
        return draws.normal(count)

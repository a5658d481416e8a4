"""Store the slopes of elementwise functions in 8, 4, 3 or 2 bits, and multiply a gradient by them.

Backward of y = f(x) is the gradient times f′(x), whose range is known before. So f′(x) is stored as codes alone,
without ranges: the values in row-major order are cut into groups of GROUP, and rounded with a dither that is subtracted
when they are read. What comes back is unbiased, with a variance of step²/12. docs/storage.md defines every byte.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..random_words import Seed
from . import accelerator_slopes, cpu_slopes, slope_reference
from .packing import fused_kernels_allowed
from .slope_functions import Slope

__all__ = ["Slope", "times_slopes", "write_slopes"]


def write_slopes(slope: Slope, source: Tensor, bits: int, seed: Seed) -> Tensor:
    """Return the codes of the slope at each value of ``source``, of any shape: -> (bytes,) uint8.

    Where a value is NaN or infinite, the slope that comes back means nothing.
    """
    source = source.detach()
    return _kernels(source, seed).write(slope, source, bits, seed)


def times_slopes(slope: Slope, grad: Tensor, codes: Tensor, bits: int, seed: Seed) -> Tensor:
    """Return grad · f′ for the slopes that ``write_slopes`` stored, in the type of ``grad``, contiguous."""
    return _kernels(grad, seed).times(slope, grad, codes, bits, seed)


class _Kernels(Protocol):
    """A module that stores slopes and multiplies by them."""

    def write(self, slope: Slope, source: Tensor, bits: int, seed: Seed) -> Tensor: ...

    def times(self, slope: Slope, grad: Tensor, codes: Tensor, bits: int, seed: Seed) -> Tensor: ...


def _kernels(x: Tensor, seed: Seed) -> _Kernels:
    if fused_kernels_allowed():
        for kernels in (cpu_slopes, accelerator_slopes):
            if kernels.serves(x, seed):
                return kernels
    return slope_reference

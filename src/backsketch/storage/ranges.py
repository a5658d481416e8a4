"""Ranges of groups: the least value and the step between levels, in bf16, rounded so that no value is outside.

bf16 has the exponents of fp32, so that nothing overflows that fp32 can hold. A step whose sign is set marks a group
whose code 0 means exactly zero: exact zeros, as after ReLU, come back exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDING = 1 + 2.0**-20  # more than all roundings of fp32 on the way from a value to its code


@dataclass(frozen=True, slots=True)
class Grid:
    """The levels of some groups, each field (..., 1) or None: values lie at least + step · [0, levels].

    ``zeros`` tells which groups keep zeros exactly; None where no group does.
    """

    least: Tensor
    step: Tensor
    zeros: Tensor | None

    @classmethod
    def of(cls, values: Tensor, bits: int, may_keep_zeros: bool) -> Grid:
        """Return the narrowest grid that holds the values: (..., size)."""
        smallest, largest = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
        least = _down(smallest)
        levels = 2**bits - 1
        zeros = _groups_with_zeros(values, least, levels) if may_keep_zeros else None
        steps = levels if zeros is None else levels - zeros.to(values.dtype)
        # Not finite where values are further apart than floats go: such a group must not come back as if it were right.
        return cls(least, _up((largest - least) / steps * _ROUNDING), zeros)

    @classmethod
    def read(cls, ranges: Tensor, dtype: torch.dtype, may_keep_zeros: bool) -> Grid:
        """Return the grid that was ``stored``: (..., 2) -> fields (..., 1)."""
        least, step = ranges.to(dtype).unsqueeze(-1).unbind(-2)
        if not may_keep_zeros:
            return cls(least, step, None)
        zeros = step.signbit()
        return cls(least, step.abs(), zeros if _any(zeros) else None)

    def stored(self) -> Tensor:
        """Return the grid as it is kept: (..., 2) bf16."""
        step = self.step if self.zeros is None else torch.where(self.zeros, -self.step, self.step)
        return torch.cat((self.least, step), -1).to(torch.bfloat16)

    def inverse_step(self) -> Tensor:
        """Return 1/step, or 0 for a group of one value."""
        return self.step.reciprocal().nan_to_num_(nan=math.nan, posinf=0)


def _groups_with_zeros(values: Tensor, least: Tensor, levels: int) -> Tensor | None:
    """Tell which groups gain by an exact zero: it takes one of their levels, and no zero gets noise. (..., 1)."""
    begin_at_zero = least == 0
    if not _any(begin_at_zero):
        return None
    others = (values != 0).sum(-1, keepdim=True)
    return begin_at_zero & (others * levels**2 < values.shape[-1] * (levels - 1) ** 2)


def _any(flags: Tensor) -> bool:
    """Tell whether a flag is set, where the answer is on the host; elsewhere it would have to be waited for."""
    return flags.device.type != "cpu" or bool(flags.any())


def _down(x: Tensor) -> Tensor:
    """Return the largest bf16 number that is not above x, in x's own type; NaN for what is not finite.

    Cutting off the lower half of fp32's bits rounds towards zero. Below zero the next number is wanted, if any bit was
    cut off.
    """
    bits = x.to(torch.float32).view(torch.int32)
    cut = (bits + (bits >> 31 & 0xFFFF) & -0x10000).view(torch.float32)
    return (cut + (x - x)).to(x.dtype)


def _up(x: Tensor) -> Tensor:
    return 0.0 - _down(-x)  # not -0.0 for 0, whose sign would say that zeros are kept exactly

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
        share: float | Tensor = _ROUNDING / levels
        if zeros is not None:
            share = torch.where(zeros, _ROUNDING / (levels - 1), _ROUNDING / levels).to(values.dtype)
        # Not finite where values are further apart than floats go: such a group must not come back as if it were right.
        return cls(least, _up((largest - least) * share), zeros)

    @classmethod
    def read(cls, ranges: Tensor, dtype: torch.dtype, scale: float, may_keep_zeros: bool) -> Grid:
        """Return the grid that was stored, times ``scale``: (..., 2) -> fields (..., 1)."""
        least, step = torch.mul(ranges, scale, out=torch.empty_like(ranges, dtype=dtype)).unsqueeze(-1).unbind(-2)
        if not may_keep_zeros:
            return cls(least, step, None)
        zeros = step.signbit()
        return cls(least, step.abs(), zeros if any_flag(zeros) else None)

    def store(self, out: Tensor) -> None:
        """Write the grid as it is kept: (..., 2) bf16."""
        step = self.step if self.zeros is None else torch.where(self.zeros, -self.step, self.step)
        torch.cat((self.least, step), -1, out=out)

    def inverse_step(self) -> Tensor:
        """Return 1/step, or 0 where all values are equal, or so close that 1/step overflows."""
        return self.step.reciprocal().nan_to_num_(nan=math.nan, posinf=0)


def _groups_with_zeros(values: Tensor, least: Tensor, levels: int) -> Tensor | None:
    """Tell which groups keep zeros exactly: that takes one of their levels, and no zero gets noise. (..., 1).

    In 8 and 4 bits every zero stays, though a level costs up to 1% and 15% of noise: a probability that a mask made
    zero must not give a padded token a gradient. In fewer bits the group must gain by it.
    """
    begin_at_zero = least == 0
    if not any_flag(begin_at_zero):
        return None
    size = values.shape[-1]
    others = (values != 0).sum(-1, keepdim=True)
    return begin_at_zero & (others < size if levels >= 15 else others * levels**2 < size * (levels - 1) ** 2)


def any_flag(flags: Tensor) -> bool:
    """Tell whether a flag may be set: on an accelerator always yes, rather than wait for the answer."""
    return flags.device.type != "cpu" or bool(flags.any())


def _down(x: Tensor) -> Tensor:
    """Return the largest bf16 number that is not above x, in x's own type; NaN for what is not finite.

    Rounding the bits of fp32, as an integer, towards zero cuts off the lower half of a number above zero, and moves one
    below zero away from it.
    """
    bits = x.to(torch.float32).view(torch.int32)
    return _as_float(bits.div(1 << 16, rounding_mode="trunc").mul_(1 << 16), x)


def _up(x: Tensor) -> Tensor:
    """Return the least bf16 number that is not below x ≥ 0, in x's own type; NaN for what is not finite."""
    bits = x.to(torch.float32).view(torch.int32)
    return _as_float((bits + 0xFFFF).bitwise_and_(-1 << 16), x)


def _as_float(bits: Tensor, x: Tensor) -> Tensor:
    return torch.add(bits.view(torch.float32), x, alpha=0.0).to(x.dtype)  # 0 · x is NaN for what is not finite

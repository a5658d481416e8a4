"""Piecewise linear functions: backward only compares what was saved, so one bit a value is exact.

Backward gets a stand-in for the saved tensor: a number on the same side of the comparison as the value was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .packed_flags import PackedFlags
from .rules import Call, Rule, is_activation
from .saving import Kept


@dataclass(frozen=True, slots=True)
class Comparison:
    """What backward asks of a saved value, and a number for which the answer is no, and one for which it is yes."""

    asks: Callable[[Tensor], Tensor]
    no: float
    yes: float

    def is_told_apart(self, dtype: torch.dtype) -> bool:
        """Tell whether the number for yes is one in this type too: there may be none between two close ends."""
        return bool(self.asks(torch.tensor((self.yes,), dtype=dtype, device="cpu")))


@dataclass(frozen=True, slots=True)
class Compared(Rule):
    """Keep one bit of each value that a piecewise linear function saves."""

    comparison_of: Callable[..., Comparison | None]  # from the options of a call; None: not covered, kept as it is

    def __call__(self, call: Call) -> Any:
        args, kwargs = call.options()
        comparison = self.comparison_of(*args, **kwargs)
        if comparison is None:
            return call.as_it_is()

        def keep(tensor: Tensor) -> Kept | None:
            if not is_activation(tensor) or not comparison.is_told_apart(tensor.dtype):
                return None
            return PackedFlags.of(comparison.asks(tensor.detach()), tensor.dtype, comparison.no, comparison.yes)

        return call.keeping("mask", keep)


def of_relu(inplace: bool = False) -> Comparison:
    """Return what backward of ReLU asks, of its result."""
    return Comparison(lambda x: x > 0, 0.0, 1.0)


def of_leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Comparison | None:
    """Return what backward of leaky ReLU asks; in place, with a slope below zero, torch itself raises."""
    return Comparison(lambda x: x > 0, -1.0, 1.0)


def between(least: float, largest: float) -> Comparison:
    """Return what backward of hardtanh asks: whether a value lies strictly between two numbers.

    Its own kernel answers, since it compares with the ends as they are, not as the type of the values rounds them.
    """

    def inside(x: Tensor) -> Tensor:
        passed: Tensor = torch.ops.aten.hardtanh_backward(x.new_ones(()).expand_as(x), x, least, largest)
        return passed != 0

    return Comparison(inside, math.inf, _middle(least, largest))


def _middle(least: float, largest: float) -> float:
    """Return a number well between two others, which may be infinite."""
    if math.isinf(least) and math.isinf(largest):
        return 0.0
    if math.isinf(largest):
        return least + max(1.0, abs(least))
    return largest - max(1.0, abs(largest)) if math.isinf(least) else (least + largest) / 2


def of_hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Comparison | None:
    """Return what backward of hardtanh asks. In place it saves its result, which is never outside."""
    return between(min_val, max_val) if min_val < max_val else None


def of_relu6(inplace: bool = False) -> Comparison:
    """Return what backward of ReLU6 asks."""
    return between(0.0, 6.0)


def of_hardsigmoid(inplace: bool = False) -> Comparison:
    """Return what backward of hardsigmoid asks."""
    return between(-3.0, 3.0)


def of_clamp(min: Any = None, max: Any = None, **_: Any) -> Comparison | None:
    """Return what backward of clamp asks: whether a value lies between two numbers, or on one of them."""
    if isinstance(min, Tensor) or isinstance(max, Tensor) or (min is None and max is None):
        return None
    least, largest = -math.inf if min is None else float(min), math.inf if max is None else float(max)
    if least > largest:
        return None

    def inside(x: Tensor) -> Tensor:
        return (x >= least) & (x <= largest)

    return Comparison(inside, math.nan, least if min is not None else largest)

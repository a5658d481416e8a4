"""The variance of rounding at random to few bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..storage import GROUP


def rounding_variance(x: Tensor, bits: int) -> Tensor:
    """Return E‖stored row − row‖² for each row: (rows, features) -> (rows,).

    A value that lies the fraction f of a step above a level goes up with probability f: variance step² · f (1 − f).
    """
    total = x.new_zeros(len(x))
    for group in torch.split(x, GROUP, dim=1):
        least = group.amin(1, keepdim=True)
        step = (group.amax(1, keepdim=True) - least) / (2**bits - 1)
        fraction = ((group - least) / step).nan_to_num(0.0).frac()  # a constant group has no steps, and is exact
        total += (step.square() * fraction * (1 - fraction)).sum(1)
    return total

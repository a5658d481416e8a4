"""The dither of rounding: a random number in [0, 1) for each value, made again from the seed when it is read.

One random number a row is enough: u = frac(r + column/φ) is uniform for every value, and only roundings in two
different rows must be independent for the gradient's variance to be that of independent rounding.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..random_words import DITHER_STREAM, Seed, pairwise_words

_GOLDEN = 0x9E3779B9  # 2³² / φ, φ the golden ratio
_DITHER_BITS = 23  # then a sum of two dithers is exact in fp32


def row_dither(seed: Seed, rows: int, device: torch.device) -> Tensor:
    """Return r or r − 1, in [−½, ½), for a random r in [0, 1) of each row: (rows, 1) fp32."""
    words = pairwise_words(seed, DITHER_STREAM, rows, device) >> (64 - _DITHER_BITS)
    return torch.mul(words, 2.0**-_DITHER_BITS, out=words.new_empty(rows, dtype=torch.float32)).unsqueeze(1)


def dither(rows: Tensor, columns: Tensor) -> Tensor:
    """Return u in [0, 1) for each value, from a number of its row and one of its column; every sum is exact in fp32."""
    if rows.device.type == "cpu":  # where ``frac`` is fast and a small step costs little
        return torch.add(rows.remainder(1), columns).frac_()
    return torch.add(rows, columns).remainder_(1)


@lru_cache(maxsize=64)
def column_dither(first: int, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return frac(column/φ) for ``count`` columns: (count,)."""
    column = torch.arange(first, first + count, device="cpu")
    fraction = ((column * _GOLDEN) & 0xFFFFFFFF) >> (32 - _DITHER_BITS)
    return (fraction.to(torch.float32) * 2.0**-_DITHER_BITS).to(dtype).to(device)

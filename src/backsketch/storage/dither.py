"""The dither of rounding: a random number in [0, 1) for each value, made again from the seed when it is read.

One random number a row is enough: u = frac(r + column/φ) is uniform for every value, and only roundings in different
rows must be independent for the gradient's noise to be that of independent rounding.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..random_words import DITHER_STREAM, Seed, random_words

_GOLDEN = 0x9E3779B9  # 2³² / φ, φ the golden ratio
_DITHER_BITS = 23  # then a sum of two dithers is exact in fp32


def row_dither(seed: Seed, rows: int, device: torch.device) -> Tensor:
    """Return a random number in [0, 1) for each row: (rows, 1) fp32."""
    words = random_words(seed, DITHER_STREAM, 0, rows, device)
    return (words >> (32 - _DITHER_BITS)).to(torch.float32).mul_(2.0**-_DITHER_BITS).unsqueeze(1)


@lru_cache(maxsize=64)
def column_dither(first: int, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return frac(column/φ) for ``count`` columns: (count,)."""
    column = torch.arange(first, first + count, device="cpu")
    fraction = ((column * _GOLDEN) & 0xFFFFFFFF) >> (32 - _DITHER_BITS)
    return (fraction.to(torch.float32) * 2.0**-_DITHER_BITS).to(dtype).to(device)

"""A checksum of the memory behind a tensor, which tells whether code outside PyTorch has changed it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..random_words import mixed_positions
from ..storage.flat_slabs import flat_slab, flat_slabs

_HOST = torch.device("cpu")
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd, so that no slab's sum loses a bit


def checksum(x: Tensor) -> Tensor:
    """Return a sum of the bits of a CPU tensor, weighted by place, so that an exchange changes it: () int64."""
    total = torch.zeros((), dtype=torch.int64, device=_HOST)
    for slab in flat_slabs(x):
        words = _words(flat_slab(x, slab))
        words = words + (words >> 32)  # a product keeps little of the highest bits, such as those of signs
        total = total * _FACTOR + words.dot(_weights(1 << (len(words) - 1).bit_length())[: len(words)])
    return total


def _words(values: Tensor) -> Tensor:
    """Return the bits of contiguous values, eight bytes at a time, and each byte that is left over: (words,) int64."""
    if values.storage_offset() * values.itemsize % 8:
        values = values.clone()
    joined = values.view(torch.uint8)
    whole = len(joined) // 8 * 8
    words = joined[:whole].view(torch.int64)
    return words if whole == len(joined) else torch.cat((words, joined[whole:].to(torch.int64)))


@lru_cache(maxsize=8)
def _weights(count: int) -> Tensor:
    """Return a number for each place, odd, so that a change of any bit there changes the product: (count,) int64."""
    return mixed_positions(count, _HOST) * 2 + 1

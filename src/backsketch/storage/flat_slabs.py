"""Slabs of a tensor of any shape and layout: its values in row-major order, some whole groups at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import numerics
from .groups import GROUP


def flat_slabs(x: Tensor) -> Iterator[slice]:
    """Split the values for a CPU's cache, between groups; on other devices all values are one slab."""
    count = x.numel()
    height = max(numerics.CHUNK_ELEMENTS // GROUP * GROUP, GROUP) if x.device.type == "cpu" else max(count, 1)
    return (slice(start, min(start + height, count)) for start in range(0, count, height))


def flat_slab(x: Tensor, slab: slice) -> Tensor:
    """Return some values in row-major order, contiguous; little more of the tensor is copied, if any: (count,)."""
    if x.is_contiguous() or x.device.type != "cpu":
        return x.reshape(-1)[slab]
    size = x[0].numel()
    first, last = slab.start // size, (slab.stop - 1) // size
    within = slice(slab.start - first * size, slab.stop - first * size)
    if first == last:
        return flat_slab(x[first], within)
    if size <= slab.stop - slab.start:
        return x[first : last + 1].reshape(-1)[within].contiguous()
    return torch.cat((flat_slab(x[first], slice(within.start, size)), flat_slab(x[last], slice(0, within.stop - size))))

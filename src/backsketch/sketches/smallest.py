"""The smallest of many random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu_library import library
from ..torch_private import has_plain_memory

_LEAST_KEYS = 1 << 10  # for fewer, a process would take longer to load the library than it saves


def places_of_smallest(keys: Tensor, count: int) -> Tensor:
    """Return where the ``count`` smallest keys are, the smallest first: (keys,) int64 -> (count,).

    Torch sorts them on a CPU, which takes longer than to store the rows that they choose.
    """
    plain = keys.is_cpu and has_plain_memory(keys) and keys.is_contiguous()
    if plain and len(keys) >= _LEAST_KEYS and (found := library()) is not None:
        places = torch.empty_like(keys)[:count]
        found.smallest(keys.data_ptr(), len(keys), count, places.data_ptr())
        return places
    return keys.topk(count, largest=False).indices

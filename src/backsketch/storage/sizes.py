"""How many bytes kept rows take."""

from __future__ import annotations

import torch

from .codes import group_bytes
from .groups import GROUP, group_count


def packed_bytes(features: int, bits: int) -> int:
    """Return how many bytes the codes of one row take."""
    # Not by divmod, which torch.compile does not have for symbolic sizes.
    return features // GROUP * group_bytes(GROUP, bits) + group_bytes(features % GROUP, bits)


def stored_bytes(rows: int, features: int, bits: int | None, itemsize: int) -> int:
    """Return how many bytes ``rows`` kept rows take, codes and ranges together."""
    if bits is None:
        return rows * features * itemsize
    return rows * (packed_bytes(features, bits) + group_count(features) * 2 * torch.bfloat16.itemsize)


def row_share(bits: int, itemsize: int) -> float:
    """Return what a stored row takes of its own bytes, if all its groups are full."""
    return stored_bytes(1, GROUP, bits, itemsize) / (GROUP * itemsize)

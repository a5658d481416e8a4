"""StoredRows: rows in few bits, and what it takes to read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..random_words import Seed
from .groups import group_count
from .sizes import packed_bytes


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Rows in few bits: codes (rows, bytes) uint8 and ranges (rows, groups, 2) bf16. The dither comes from the seed."""

    codes: Tensor
    ranges: Tensor
    bits: int
    rotated: bool
    features: int
    seed: Seed

    @classmethod
    def empty(cls, like: Tensor, rows: int, features: int, bits: int, rotated: bool, seed: Seed) -> StoredRows:
        """Return room for ``rows`` rows on the device of ``like``."""
        codes = like.new_empty(rows, packed_bytes(features, bits), dtype=torch.uint8)
        ranges = like.new_empty(rows, group_count(features), 2, dtype=torch.bfloat16)
        return cls(codes, ranges, bits, rotated, features, seed)

    @property
    def rows(self) -> int:
        """Return how many rows there are."""
        return self.codes.shape[0]

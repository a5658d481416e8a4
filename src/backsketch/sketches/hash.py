"""Balanced CountSketch: every row goes to one bucket with a random sign, and buckets differ by at most one row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Sketch
from .law import Law, RowBlocks


class Hash(Sketch):
    """S with one ±1 a row; the first rows % dim buckets hold one row more than the others."""

    __slots__ = ()

    @classmethod
    def law(cls, blocks: RowBlocks, dim: int) -> Law:
        """Balanced CountSketch: (P + g − 2C) · Pr(two rows share a bucket)."""
        size, larger = divmod(blocks.rows, dim)
        pairs = larger * (size + 1) * size + (dim - larger) * size * (size - 1)
        shared = pairs / (blocks.rows * (blocks.rows - 1))
        return Law(energy=shared, coincidence=-2 * shared, product=shared)

    def flops(self, features: int) -> int:
        return 2 * self.rows * features

    def helper_bytes(self, features: int) -> int:
        return 8 * self.rows

    def compress(self, x: Tensor) -> Tensor:
        draws = self.draws(x.device)
        order = draws.keys(self.rows).argsort()
        signs = draws.signs(self.rows).to(x.dtype)
        # An embedding bag is exactly this: gather, weigh and add, with nothing of the input's size in between.
        return F.embedding_bag(order, x, self.bucket_starts(x.device), mode="sum", per_sample_weights=signs)

    def bucket_starts(self, device: torch.device) -> Tensor:
        """Return where each bucket starts in the shuffled rows: (dim,)."""
        size, larger = divmod(self.rows, self.dim)
        bucket = torch.arange(self.dim, device=device)
        return bucket * size + bucket.clamp(max=larger)

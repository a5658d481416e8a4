"""Balanced CountSketch: every row goes to one bucket with a random sign, and buckets differ by at most one row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Sketch, random_signs


class Hash(Sketch):
    """S with one ±1 a row; the first rows % dim buckets hold one row more than the others."""

    __slots__ = ()

    def compress(self, x: Tensor) -> Tensor:
        generator = self.generator(x.device)
        order = torch.randperm(self.rows, generator=generator, device=x.device)
        signs = random_signs(self.rows, generator).to(x.dtype)
        # An embedding bag is exactly this: gather, weigh and add, with nothing of the input's size in between.
        return F.embedding_bag(order, x, self.bucket_starts(x.device), mode="sum", per_sample_weights=signs)

    def bucket_starts(self, device: torch.device) -> Tensor:
        """Return where each bucket starts in the shuffled rows: (dim,)."""
        size, larger = divmod(self.rows, self.dim)
        bucket = torch.arange(self.dim, device=device)
        return bucket * size + bucket.clamp(max=larger)

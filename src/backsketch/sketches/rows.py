"""Row sampling: uniform, without replacement."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Sketch


class Rows(Sketch):
    """S that picks ``dim`` distinct rows and weighs them by √(rows/dim)."""

    __slots__ = ()

    @property
    def gain(self) -> float:
        return self.rows / self.dim

    def compress(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.chosen(x.device))

    def chosen(self, device: torch.device) -> Tensor:
        """Return the indices of the kept rows: (dim,)."""
        return torch.randperm(self.rows, generator=self.generator(device), device=device)[: self.dim]

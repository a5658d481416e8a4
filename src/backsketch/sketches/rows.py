"""Row sampling: uniform, without replacement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Sketch
from .law import Law, RowBlocks


class Rows(Sketch):
    """S that picks ``dim`` distinct rows and weighs them by √(rows/dim)."""

    __slots__ = ()

    mixes_rows = False
    leaves_out_padding = True

    @classmethod
    def law(cls, blocks: RowBlocks, dim: int) -> Law:
        """Uniform rows without replacement: (B·C − g) / k · (B − k) / (B − 1), which is (1/ρ − 1) · D²_SGD."""
        factor = (blocks.rows - dim) / (dim * (blocks.rows - 1))
        return Law(energy=0.0, coincidence=factor * blocks.rows, product=-factor)

    @classmethod
    def multiple_of_sgd(cls, ratio: float) -> float:
        return 1 / ratio - 1

    def flops(self, features: int) -> int:
        return 0

    def helper_bytes(self, features: int) -> int:
        return 8 * self.rows

    def among(self, valid: Tensor) -> Sketch:
        return ValidRows(self.rows, self.dim, self.seed, valid)

    @property
    def gain(self) -> float | Tensor:
        return self.rows / self.dim

    def compress(self, x: Tensor) -> Tensor:
        return self.pick(x, self.chosen(x.device))

    def chosen(self, device: torch.device) -> Tensor:
        """Return the indices of the kept rows: (dim,)."""
        return self.draws(device).choice(self.dim, self.rows)

    def places(self, device: torch.device) -> Tensor:
        """Return for each row which of the kept rows it is, or −1: (rows,)."""
        kept = torch.arange(self.dim, device=device)
        return torch.full((self.rows,), -1, device=device).scatter_(0, self.chosen(device), kept)

    def pick(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the ``chosen`` rows of x: (rows, features), (count,) -> (count, features)."""
        return x.index_select(0, chosen)


@dataclass(frozen=True, slots=True, eq=False)
class ValidRows(Rows):
    """Rows that picks among valid rows only; if they are fewer than ``dim``, the rest are zero rows.

    E[S Sᵀ] is the identity on the valid rows and zero on the others. How many are valid is read on the device.
    """

    valid: Tensor

    @property
    def gain(self) -> Tensor:
        count = self.valid.sum().clamp(min=1).to(torch.float32)
        return count / count.clamp(max=self.dim)

    def pick(self, x: Tensor, chosen: Tensor) -> Tensor:
        padded = ~self.valid.index_select(0, chosen)
        return x.index_select(0, chosen).masked_fill_(padded.unsqueeze(1), 0)

    def chosen(self, device: torch.device) -> Tensor:
        return self.draws(device).choice(self.dim, self.rows, among=self.valid)

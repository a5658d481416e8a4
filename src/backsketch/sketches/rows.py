"""Row sampling: uniform, without replacement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Sketch


class Rows(Sketch):
    """S that picks ``dim`` distinct rows and weighs them by √(rows/dim)."""

    __slots__ = ()

    @property
    def gain(self) -> float | Tensor:
        return self.rows / self.dim

    def compress(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.chosen(x.device))

    def chosen(self, device: torch.device) -> Tensor:
        """Return the indices of the kept rows: (dim,)."""
        if device.type == "meta":  # which has no generator
            return torch.randperm(self.rows, device=device)[: self.dim]
        return torch.randperm(self.rows, generator=self.generator(device), device=device)[: self.dim]


@dataclass(frozen=True, slots=True, eq=False)
class ValidRows(Rows):
    """Rows that picks only among the valid ones; what is left over of ``dim`` is filled with zero rows.

    E[S Sᵀ] is the identity on the valid rows and zero on the others. How many are valid is read on the device.
    """

    valid: Tensor

    @property
    def gain(self) -> Tensor:
        count = self.valid.sum().clamp(min=1).to(torch.float32)
        return count / count.clamp(max=self.dim)

    def compress(self, x: Tensor) -> Tensor:
        chosen = self.chosen(x.device)
        padded = ~self.valid.index_select(0, chosen)
        return x.index_select(0, chosen).masked_fill_(padded.unsqueeze(1), 0)

    def chosen(self, device: torch.device) -> Tensor:
        order = torch.randperm(self.rows, generator=self.generator(device), device=device)
        valid_first = self.valid.index_select(0, order).to(torch.uint8).sort(stable=True, descending=True).indices
        return order.index_select(0, valid_first[: self.dim])

"""Operations whose backward asks only for the shape of what they save: nothing of its values is kept. Exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .rules import Call, Rule, is_activation
from .saving import Kept


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """The shape of a tensor, and nothing of its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    tensors: tuple[Tensor, ...] = ()

    def unpack(self) -> Tensor:
        """Return zeros of this shape, which take the memory of one."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)

    def held_by(self, tensors: tuple[Tensor, ...]) -> Shape:
        """Return itself: no tensor holds it."""
        return self


@dataclass(frozen=True, slots=True)
class ShapeAlone(Rule):
    """Keep the shapes of the activations that an operation saves, and indices as they are."""

    def __call__(self, call: Call) -> Any:
        def keep(tensor: Tensor) -> Kept | None:
            return Shape(tensor.shape, tensor.dtype, tensor.device) if is_activation(tensor) else None

        return call.keeping("other", keep)

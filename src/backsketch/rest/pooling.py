"""Max-pooling: backward needs the places of the largest values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .rules import Call, Rule, is_activation
from .saving import Kept


@dataclass(frozen=True, slots=True, eq=False)
class SmallerIntegers:
    """Integers in a smaller type that holds them all."""

    tensors: tuple[Tensor, ...]
    dtype: torch.dtype

    def unpack(self) -> Tensor:
        """Return them in their own type."""
        return self.tensors[0].to(self.dtype)

    def held_by(self, tensors: tuple[Tensor, ...]) -> SmallerIntegers:
        """Return the same, held by another tensor of equal values, or by none for now."""
        return replace(self, tensors=tensors)


@dataclass(frozen=True, slots=True)
class Pooling(Rule):
    """Keep the input in the bits of ``other``, and places in the smallest type that can count its values.

    A place is a number within the last ``dimensions``. Others come before them: channels, and a batch if there is one.
    """

    dimensions: int

    def __call__(self, call: Call) -> Any:
        x = call.argument(0, "input")
        places = x.shape[-self.dimensions :].numel() if isinstance(x, Tensor) else 2**31

        def keep(tensor: Tensor) -> Kept | None:
            if tensor.dtype == torch.int64 and places < 2**31:
                smaller = torch.int16 if places < 2**15 else torch.int32
                return SmallerIntegers((tensor.to(smaller),), tensor.dtype)
            return call.step.few_bits(tensor, call.step.config.other) if is_activation(tensor) else None

        return call.keeping("other", keep)

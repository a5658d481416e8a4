"""PackedFlags: a tensor that has only two values, or of which backward needs only a yes or no, in one bit a value."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..linear.sharing import shared
from ..storage.flags import flag_bytes, read_flags, write_flags
from ..storage.two_numbers import read_two_numbers, write_two_numbers


@dataclass(frozen=True, slots=True, eq=False)
class PackedFlags:
    """One bit for each value, and the two numbers that stand for no and yes."""

    tensors: tuple[Tensor, ...]
    shape: torch.Size
    dtype: torch.dtype
    no: float
    yes: float

    @classmethod
    def of(cls, flags: Tensor, dtype: torch.dtype = torch.bool, no: float = 0.0, yes: float = 1.0) -> PackedFlags:
        """Keep one bit of each flag."""
        return cls((write_flags(flags),), flags.shape, dtype, no, yes)

    @classmethod
    def of_two_numbers(cls, numbers: Tensor, other: float) -> PackedFlags | None:
        """Keep one bit of each number, which are zero or ``other``; None if a third is seen."""
        bits = write_two_numbers(numbers, other)
        return None if bits is None else cls((bits,), numbers.shape, numbers.dtype, 0.0, other)

    @classmethod
    def of_mask(cls, mask: Tensor) -> PackedFlags | None:
        """Keep one bit of each flag once for all operations that save this mask; None if that saves nothing."""
        if mask.untyped_storage().nbytes() <= flag_bytes(mask.numel()):  # expanded
            return None
        # Each time another reader: unlike a layer, an operation may take the bits of one mask again.
        bits = shared(mask, "flags", object(), lambda: (write_flags(mask),))
        return cls(bits, mask.shape, torch.bool, 0.0, 1.0)

    def unpack(self) -> Tensor:
        """Return a tensor of the two numbers."""
        if self.dtype != torch.bool and self.no == 0:
            return read_two_numbers(self.tensors[0], self.shape, self.dtype, self.yes)
        flags = read_flags(self.tensors[0], self.shape)
        if self.dtype == torch.bool:
            return flags
        numbers = flags.new_tensor((self.no, self.yes), dtype=self.dtype)
        return torch.where(flags, numbers[1], numbers[0])

    def held_by(self, tensors: tuple[Tensor, ...]) -> PackedFlags:
        """Return the same, held by another tensor of equal values, or by none for now."""
        return replace(self, tensors=tensors)

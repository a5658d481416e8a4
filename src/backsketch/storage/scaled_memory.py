"""ScaledMemory: what was computed from packed memory by a product with a small tensor, made again when it is read.

A norm that is written out multiplies its input x by one number a row, and then the result x̂ by a weight. Both products
save their operands. Where x has a precise copy, x̂ needs none of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..saved_as_it_is import SavedAsItIs
from .memory_rows import dense_strides
from .packed_tensor import PackedMemory, PackedTensor


@dataclass(frozen=True, eq=False)  # without slots, for weak references
class ScaledMemory(PackedMemory):
    """Packed memory times a tensor that is broadcast to it, in the type of the product, and then cast."""

    source: PackedTensor = field(kw_only=True)
    factor: SavedAsItIs | None = field(kw_only=True)
    casts: tuple[torch.dtype, ...] = field(kw_only=True)

    @property
    def offloaded(self) -> bool:
        """Tell whether the packed memory is in other hands; the factor is small."""
        return self.source.memory.offloaded

    def held_by(self, tensors: tuple[Tensor, ...]) -> PackedMemory:
        """Return the same, held by other tensors of equal values, or by none for now."""
        factor = SavedAsItIs.of(tensors[-1]) if tensors else None
        return replace(self, source=self.source.held_by(tensors[:-1]), factor=factor)

    def brought_back(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold it."""
        return (*self.source.tensors, *(() if self.factor is None else (self.factor.unpack(),)))

    def values(self) -> Tensor:
        """Return the values in their order in memory: (values,)."""
        assert self.factor is not None
        product = self.source.unpack() * self.factor.unpack()
        for dtype in self.casts:
            product = product.to(dtype)
        return product.as_strided((product.numel(),), (1,))

    def variances(self) -> Tensor:
        """Return the variance of each value's rounding error: (values,)."""
        assert self.factor is not None
        spread = self.source.variance() * self.factor.unpack().square()
        return spread.as_strided((spread.numel(),), (1,))


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How a tensor follows from packed memory: seen as of this shape, times a factor, cast to these types in turn."""

    shape: torch.Size
    strides: tuple[int, ...]
    factor: SavedAsItIs
    casts: tuple[torch.dtype, ...]

    @classmethod
    def of_product(cls, x: PackedTensor, factor: Tensor, product: Tensor) -> Recipe | None:
        """Return the recipe of x times a factor that is broadcast to it, or None if x lies otherwise in memory."""
        if isinstance(x.memory, ScaledMemory) or x.shape != product.shape or 0 in x.strides:
            return None
        if dense_strides(x.shape, x.strides) != product.stride():
            return None
        return cls(x.shape, x.strides, SavedAsItIs.of(factor), (product.dtype,))

    def applied_to(self, memory: PackedMemory) -> ScaledMemory:
        """Return the memory that it makes."""
        packed = memory.bits, memory.rotated, memory.features, memory.seed
        source = PackedTensor(memory, self.shape, self.strides)
        return ScaledMemory((), *packed, self.casts[-1], source=source, factor=self.factor, casts=self.casts)

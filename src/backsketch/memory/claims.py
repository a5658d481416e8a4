"""Claims: an operation saves a tensor for backward, and storages are kept for it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from ..config import SketchConfig
from ..linear.keeping import kept_bytes

Chosen: TypeAlias = Mapping[str, SketchConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One tensor that an operation saved, and what is kept for it. It holds no tensor itself.

    Attributes:
        holder: the module that ran, or who else it is kept for ("the loss").
        operation: the name of its graph node without "Backward", "Gelu" for one; "" where torch does not show it.
        shape, dtype: of the tensor that was saved.
        storages: what is kept: the storages behind the tensor, or behind what hooks keep instead.
        replaced: whether hooks keep something instead.
    """

    holder: str
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    storages: frozenset[int]
    replaced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearClaim(Claim):
    """One call of a linear layer that keeps its input, which a sketch could replace. Its shape is that of the input.

    Where padded rows are left out, ``mask`` says by which mask: sketches under it keep it, one byte a row, once.
    ``held`` tells that the operation that made the input keeps it: then a sketched layer keeps it too, and no sketch.
    """

    source: Hashable
    mask: Hashable = None
    held: bool = False

    @property
    def layer(self) -> str:
        return self.holder

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def in_features(self) -> int:
        return self.shape[-1]

    def drops_input(self, chosen: Chosen) -> bool:
        """Tell whether this call lets go of its input: its layer is sketched and its input not kept as it is."""
        config = chosen.get(self.layer)
        return config is not None and not (self.held or config.keeps_input(self.rows))

    def kept_under(self, config: SketchConfig) -> int:
        """Return what it keeps beside its input: a sketch and its seed, or nothing where the input itself is kept."""
        if self.held or config.keeps_input(self.rows):
            return 0
        return kept_bytes(config, self.rows, self.in_features, self.dtype.itemsize)

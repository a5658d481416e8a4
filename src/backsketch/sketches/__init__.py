"""The kinds of sketch, by name."""

from __future__ import annotations

from ..random_words import Seed
from .base import BlockKind, Sketch, Whole
from .blocked import Blocked
from .cosine import Cosine
from .fourier import Fourier
from .gaussian import Gaussian
from .hadamard import Hadamard
from .hash import Hash
from .rademacher import Rademacher
from .rows import Rows

SKETCHES: dict[str, type[Sketch]] = {
    "gaussian": Gaussian,
    "rademacher": Rademacher,
    "cosine": Cosine,
    "fourier": Fourier,
    "hadamard": Hadamard,
    "rows": Rows,
    "hash": Hash,
}


def make_sketch(kind: str, rows: int, dim: int, seed: Seed, block: int | None = None) -> Sketch:
    """Return the sketch of this kind and size: whole when nothing would be dropped, blocked when asked to be."""
    if dim == rows:
        return Whole(rows, dim, seed)
    cls = SKETCHES[kind]
    if block is not None and block < rows and issubclass(cls, BlockKind):
        return Blocked(rows, dim, seed, cls, block)
    return cls(rows, dim, seed)


__all__ = ["SKETCHES", "BlockKind", "Blocked", "Sketch", "Whole", "make_sketch"]

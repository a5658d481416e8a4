"""Blocks: how a sketch splits its rows, which is all that its variance depends on besides the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import SketchConfig
from .sketches import Blocked, BlockKind, Whole, make_sketch

Mirror: TypeAlias = tuple[int, int]  # (a, c) with a = ±1 sends place i of a block to place (a·i + c) mod height
IDENTITY: Mirror = (1, 0)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The independent blocks of a sketch: row i is in block i mod ``count``, at place i // ``count``.

    A sketch that is not blocked is one block. ``height`` is n, how many places a block is drawn for. ``mirrors`` are
    the permutations σ that tell how the squares of a transform H correlate, for all places i, j:
    Σ_p H_ip² H_jp² = 1/n + Σ_σ ([j = σ(i)] − 1/n) / (2n).
    """

    kind: str
    rows: int
    dim: int
    count: int
    height: int
    mirrors: tuple[Mirror, ...]
    whole: bool

    @property
    def dims(self) -> list[int]:
        """List B_proj of each block; the first blocks take what does not divide."""
        dim, larger = divmod(self.dim, self.count)
        return [dim + 1] * larger + [dim] * (self.count - larger)

    def split(self, x: Tensor) -> Tensor:
        """Put rows at their places, with zeros at the places left: (rows, ...) -> (places, count, ...)."""
        if missing := -self.rows % self.count:
            x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))
        return x.reshape(-1, self.count, *x.shape[1:])


@lru_cache(maxsize=256)
def blocks_of(config: SketchConfig, rows: int) -> Blocks:
    """Return the blocks into which ``config`` splits an input of ``rows`` rows."""
    sketch = make_sketch(config.kind, rows, config.dim_for(rows), 0, config.block)
    count, height = 1, rows
    if isinstance(sketch, Blocked):
        count, height = sketch.count, sketch.height
    elif isinstance(sketch, BlockKind):
        height = sketch.block_height(rows)
    whole = isinstance(sketch, Whole)
    mirrors = () if whole or config.kind not in _MIRRORS else _MIRRORS[config.kind](height)
    return Blocks(config.kind, rows, sketch.dim, count, height, mirrors, whole)


def reflect(values: Tensor, mirror: Mirror) -> Tensor:
    """Return at each place i what ``values`` has at σ(i): (places, ...) -> (places, ...)."""
    direction, shift = mirror
    if direction == 1:
        return values.roll(-shift, 0)
    return values.flip(0).roll(shift + 1, 0)


def fixed_places(places: int, mirror: Mirror, device: torch.device) -> Tensor:
    """Tell which places a mirror leaves where they are: (places,)."""
    place = torch.arange(places, device=device)
    return reflect(place, mirror) == place


def _cosine_mirrors(height: int) -> tuple[Mirror, ...]:
    return IDENTITY, (-1, height - 1)


def _fourier_mirrors(height: int) -> tuple[Mirror, ...]:
    if height <= 2:
        return ()  # of this size it is the Hadamard transform
    if height % 2:
        return IDENTITY, (-1, 0)
    return IDENTITY, (1, height // 2), (-1, 0), (-1, height // 2)


_MIRRORS: dict[str, Callable[[int], tuple[Mirror, ...]]] = {"cosine": _cosine_mirrors, "fourier": _fourier_mirrors}

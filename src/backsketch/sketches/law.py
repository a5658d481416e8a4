"""Law: the formula for the variance D² that a kind of sketch adds, and how a sketch splits rows into blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Mirror: TypeAlias = tuple[int, int]  # (a, c) with a = ±1 sends place i of a block to place (a·i + c) mod height
IDENTITY: Mirror = (1, 0)


@dataclass(frozen=True, slots=True)
class Law:
    """D² of one block = energy · P + coincidence · C + product · g + mirrored · M; noise/moments.py defines them."""

    energy: float
    coincidence: float
    product: float
    mirrored: float = 0.0


NO_NOISE = Law(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class RowBlocks:
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
        """List the outputs (B_proj) of each block; if they do not divide evenly, the first blocks have one more."""
        dim, larger = divmod(self.dim, self.count)
        return [dim + 1] * larger + [dim] * (self.count - larger)

    def split(self, x: Tensor) -> Tensor:
        """Put rows at their places, and zeros at empty places: (rows, ...) -> (places, count, ...)."""
        if missing := -self.rows % self.count:
            x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))
        return x.reshape(-1, self.count, *x.shape[1:])


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

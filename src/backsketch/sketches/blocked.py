"""Blocked sketches: S = blockdiag(S_1 … S_T) over strided rows, drawn independently, multiplied in one batched GEMM."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ..numerics import CHUNK_ELEMENTS
from .base import BlockKind, Sketch
from .law import Law, RowBlocks


@dataclass(frozen=True, slots=True)
class Blocked(Sketch):
    """Row i goes to block i mod T; each block of about ``block`` rows has its own small S of the given kind.

    Blocks are independent, so their errors add up without cross terms, and no sign flips of the input are needed.
    When dim < rows/block the blocks grow, so that each still has at least one output.
    """

    kind: type[BlockKind]
    block: int

    @property
    def count(self) -> int:
        """Return T, the number of blocks."""
        return min(-(-self.rows // self.block), self.dim)

    @property
    def height(self) -> int:
        """Return how many rows every block is drawn for; a shorter block leaves the last ones unused."""
        return self.kind.block_height(-(-self.rows // self.count))

    @classmethod
    def law(cls, blocks: RowBlocks, dim: int) -> Law:
        raise NotImplementedError("the law of a blocked sketch is that of its kind")

    def flops(self, features: int) -> int:
        return sum(2 * len(rows) * dim for rows, dim in self.members()) * features

    def helper_bytes(self, features: int) -> int:
        blocks = max(1, min(self.count, CHUNK_ELEMENTS // max(1, self.dim // self.count * self.height)))
        return blocks * self.kind.draw_bytes(-(-self.dim // self.count)) * self.height

    def members(self) -> list[tuple[range, int]]:
        """List each block as (its rows, how many outputs it has), in the order of the outputs."""
        dims = [dim for first, last, dim in self._runs() for _ in range(first, last)]
        return [(range(block, self.rows, self.count), dim) for block, dim in enumerate(dims)]

    def compress(self, x: Tensor) -> Tensor:
        draws = self.draws(x.device)
        out = x.new_empty(self.dim, x.shape[1])
        full = self.rows // self.count
        blocks = x[: full * self.count].view(full, self.count, -1).transpose(0, 1)
        tail = x[full * self.count :].unsqueeze(1)
        done = 0
        for first, last, dim in self._chunks():
            matrices = self.kind.draw_blocks(last - first, dim, self.height, draws).to(x.dtype)
            scale = math.sqrt(self.kind.block_gain(dim, self.height))  # in the GEMM: exact in half precision too
            target = out[done : done + (last - first) * dim].view(last - first, dim, x.shape[1])
            target.baddbmm_(matrices[:, :, :full], blocks[first:last], beta=0, alpha=scale)
            longer = min(last, len(tail)) - first  # the first rows % T blocks have one row more
            if longer > 0:
                last_row = matrices[:longer, :, full : full + 1]
                target[:longer].baddbmm_(last_row, tail[first : first + longer], alpha=scale)
            done += (last - first) * dim
        return out

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first block, last block, outputs a block): the first dim % T blocks have one output more."""
        dim, larger = divmod(self.dim, self.count)
        if larger:
            yield 0, larger, dim + 1
        yield larger, self.count, dim

    def _chunks(self) -> Iterator[tuple[int, int, int]]:
        """Split the runs so that the matrices drawn at once stay small."""
        for first, last, dim in self._runs():
            step = max(1, CHUNK_ELEMENTS // (dim * self.height))
            for start in range(first, last, step):
                yield start, min(start + step, last), dim

"""The noise that few-bit storage adds to ∂W: Σ_j ‖(SᵀY)_j‖² v_j over kept rows j, rounded with variance v_j."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import SketchConfig
from ..numerics import row_slabs, widest
from ..sketches import SKETCHES, Sketch, make_sketch
from ..sketches.law import RowBlocks
from ..sketches.rows import Rows
from ..storage.groups import GROUP, group_sizes, parts_of
from ..storage.ranges import Grid, any_flag
from ..storage.rotation import rotate


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounding adds, once Y is known.

    Kinds that keep rows as they are have it in closed form: each row is kept with probability k/B, so its mean over S
    is B/k · Σ_i ‖y_i‖² v_i over all rows. A kind that mixes rows rounds mixtures, whose ranges have no closed
    form: there it is what rounding adds under one S, drawn apart from the layer's own.
    """

    variances: Tensor
    weight: float
    sketch: Sketch | None

    @classmethod
    def of(cls, x: Tensor, blocks: RowBlocks, config: SketchConfig, seed: int) -> Rounding:
        """Read off x, as it is sketched, what rounding needs: (rows, in_features)."""
        if config.bits is None:
            raise ValueError("bits must be 8, 4, 3 or 2 for rounding to add noise, got None")
        if not mixes_rows(blocks):
            return cls(_variances(x, config.bits, config.rotate), blocks.rows / blocks.dim, None)
        sketch = make_sketch(blocks.kind, blocks.rows, blocks.dim, seed, config.block)
        return cls(_variances(sketch.compress(x), config.bits, config.rotate), float(sketch.gain), sketch)

    def variance(self, y: Tensor) -> Tensor:
        """Return what rounding adds to D²: y (rows, out_features) -> ()."""
        weights = widest(y if self.sketch is None else self.sketch.compress(y)).square().sum(1)
        return self.weight * (weights * self.variances).sum()


@dataclass(frozen=True, slots=True)
class StoredRounding:
    """What rounding adds given the rows that were kept, read off their stored ranges: gain² Σ_j ‖y_j‖² v_j.

    Its mean over S is that of ``Rounding``. For kinds that keep rows as they are.
    """

    variances: Tensor
    gain: float | Tensor
    chosen: Tensor | None

    @classmethod
    def of(cls, ranges: Tensor, sketch: Sketch, x: Tensor) -> StoredRounding:
        """Read the steps in ``ranges``, (dim, groups, 2), which were stored of the rows of x that ``sketch`` picks."""
        chosen = sketch.chosen(x.device) if isinstance(sketch, Rows) else None
        steps = ranges[..., 1].to(torch.float32)
        sizes = steps.new_full((steps.shape[1],), GROUP)
        if rest := x.shape[1] % GROUP:
            sizes[-1] = rest
        zeros = steps.signbit()
        if any_flag(zeros):  # groups that keep their zeros exactly
            rows = x if chosen is None else x.index_select(0, chosen)
            counts = [
                (rows[:, columns] != 0).reshape(len(rows), *group_sizes(groups, columns.stop - columns.start)).sum(-1)
                for columns, groups in parts_of(x.shape[1])
            ]
            sizes = torch.where(zeros, torch.cat(counts, 1).to(sizes.dtype), sizes)
        return cls(widest((steps.square() * sizes).sum(1) / 12), sketch.gain, chosen)

    def variance(self, y_norms: Tensor) -> Tensor:
        """Return what rounding adds to D², from the norms of all rows of Y: (rows,) -> ()."""
        norms = y_norms if self.chosen is None else y_norms.index_select(0, self.chosen)
        return (widest(norms).square() * self.variances).sum() * self.gain**2


def mixes_rows(blocks: RowBlocks) -> bool:
    """Tell whether a kept row is a mixture of rows, not one of them."""
    return not blocks.whole and SKETCHES[blocks.kind].mixes_rows


def _variances(x: Tensor, bits: int, rotated: bool) -> Tensor:
    slabs = [rounding_variance(x[slab], bits, rotated) for slab in row_slabs(*x.shape)]
    return widest(torch.cat(slabs) if slabs else x.new_zeros(0))


def rounding_variance(x: Tensor, bits: int, rotated: bool = False) -> Tensor:
    """Return the variance that storage adds to each row, summed over its values: (rows, features) -> (rows,).

    Each value of a group has step²/12, but for the zeros of a group that keeps them exactly.
    """
    total = x.new_zeros(len(x))
    for columns, groups in parts_of(x.shape[1]):
        values = x[:, columns].reshape(-1, *group_sizes(groups, columns.stop - columns.start))
        if rotated:
            values = rotate(values)
        grid = Grid.of(values, bits, may_keep_zeros=not rotated)
        count = values.new_full((), values.shape[-1])
        if grid.zeros is not None:
            count = torch.where(grid.zeros, (values != 0).sum(-1, keepdim=True).to(x.dtype), count)
        total += (grid.step.square() / 12 * count).sum((1, 2))
    return total

"""The weight gradient that comes back from what was kept of an input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from ..config import SketchConfig
from ..numerics import compute_dtype, row_slabs
from ..seeds import seed_value
from ..sketches import Sketch, Whole
from ..sketches.rows import Rows
from ..storage.groups import group_sizes, parts_of
from ..storage.packing import fused, read
from ..storage.rotation import rotate_back
from ..storage.stored_rows import StoredRows
from .keeping import drawn_on, sketch_for

# Rows turned back from codes at once: half of all, but enough for a good GEMM; all of them if that is few values.
_READS, _LEAST_READ, _FEW_VALUES = 2, 512, 1 << 21
_LEAST_OUTPUTS = 512  # columns of Y compressed at once, at least
# FLOPs of a GEMM in the time that copying one value takes; on accelerators those of A100 and H100.
_FLOPS_PER_COPY_ON_CPU, _FLOPS_PER_COPY = 128, 1024


def weight_gradient(
    kept: tuple[Tensor, ...], y: Tensor, config: SketchConfig, in_features: int, valid: Tensor | None = None
) -> Tensor:
    """Return the unbiased estimate of Yᵀ X: kept, y (rows, out_features) -> (out_features, in_features)."""
    seed, *stored = kept
    sketch = drawn_on(y, sketch_for(config, y.shape[0], seed, valid))
    if config.bits is None:
        gradient = _product(sketch, y, stored[0], in_features)
    else:
        rows = StoredRows(stored[0], stored[1], config.bits, config.rotate, in_features, seed_value(seed))
        # A product with rotated rows is rotated. A fused kernel rotates rows back as it reads them; else the shorter of
        # the rows and the product is rotated back.
        in_one_pass = fused(rows, y.dtype)
        late = config.rotate and y.shape[1] <= rows.rows and not in_one_pass
        places = sketch.places(y.device) if in_one_pass and _spreading_pays(sketch, rows) else None
        gradient = _product(sketch, y, _HalvedRows(rows, in_one_pass, late, places), in_features)
        if late:
            _rotate_back_(gradient)
    if config.center and not config.keeps_input(y.shape[0]):
        _add_outer(gradient, y.sum(0, dtype=compute_dtype(y.dtype)), stored[-1])
    return gradient


def _spreading_pays(sketch: Sketch, rows: StoredRows) -> TypeGuard[Rows]:
    """Tell whether to multiply all of Y, with zeros for rows that were not kept, rather than copy the rows of Y."""
    if not isinstance(sketch, Rows):
        return False
    # For each output: the FLOPs of rows of zeros against a copy of dim values of Y.
    copied = _FLOPS_PER_COPY_ON_CPU if rows.codes.device.type == "cpu" else _FLOPS_PER_COPY
    return 2 * (sketch.rows - sketch.dim) * rows.features < copied * sketch.dim


def _product(sketch: Sketch, y: Tensor, rows: Tensor | _HalvedRows, in_features: int) -> Tensor:
    """Return gain · (Rᵀy)ᵀ · rows: (rows, out_features) -> (out_features, in_features)."""
    gain = sketch.gain
    factor = 1.0 if isinstance(gain, Tensor) else gain
    out = y.new_empty(y.shape[1], in_features)
    if isinstance(rows, _HalvedRows):
        if rows.places is not None:
            sketch = Whole(sketch.rows, sketch.rows, sketch.seed)
        if rows.at_once(y):
            rows, factor = rows.all(y.dtype), 2 * factor
    if isinstance(sketch, Whole):  # nothing is compressed, so no columns of Y need be
        _add_whole(y, rows, factor, out)
    elif isinstance(rows, Tensor):
        compress = _compression(sketch, y)
        for outputs in _output_slabs(y, in_features, sketch.dim):
            out[outputs].addmm_(compress(y[:, outputs]).t(), rows, beta=0, alpha=factor)
    elif isinstance(sketch, Rows):
        _add_picked(sketch, y, rows, factor, out)
    else:
        for outputs in _output_slabs(y, in_features, sketch.dim):
            part = sketch.compress(y[:, outputs])
            for slab in rows.slabs():
                out[outputs].addmm_(part[slab].t(), rows.some(slab, y.dtype), beta=min(slab.start, 1), alpha=2 * factor)
    return out.mul_(gain) if isinstance(gain, Tensor) else out


def _add_whole(y: Tensor, rows: Tensor | _HalvedRows, factor: float, out: Tensor) -> None:
    """Put factor · yᵀ · rows in ``out``; rows that are kept in few bits are read some at a time."""
    if isinstance(rows, Tensor):
        out.addmm_(y.t(), rows, beta=0, alpha=factor)
        return
    for slab in rows.slabs():
        out.addmm_(y[slab].t(), rows.some(slab, y.dtype), beta=min(slab.start, 1), alpha=2 * factor)


def _add_picked(sketch: Rows, y: Tensor, rows: _HalvedRows, factor: float, out: Tensor) -> None:
    """Put factor · (Rᵀy)ᵀ · rows in ``out`` for a sketch that picks rows, some of which are read at a time."""
    chosen = sketch.chosen(y.device)
    for slab in rows.slabs():
        picked, some = chosen[slab], rows.some(slab, y.dtype)
        for outputs in _output_slabs(y, out.shape[1], len(picked)):
            part = sketch.pick(y[:, outputs], picked)
            out[outputs].addmm_(part.t(), some, beta=min(slab.start, 1), alpha=2 * factor)


def _compression(sketch: Sketch, y: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that compresses columns of y; the rows to pick are found once for all columns."""
    return partial(sketch.pick, chosen=sketch.chosen(y.device)) if isinstance(sketch, Rows) else sketch.compress


def _output_slabs(y: Tensor, in_features: int, kept: int) -> Iterator[slice]:
    """Split the columns of y into chunks of which ``kept`` rows take no more than half of the input's bytes.

    An exact layer holds its input and the input's gradient at the peak. The compressed Y must not be larger, or a layer
    with many outputs, as lm_head, would raise the peak. In half precision the unpacked rows stand beside it: a quarter.
    """
    outputs = y.shape[1]
    most = len(y) * in_features // (2 if y.dtype == compute_dtype(y.dtype) else 4)
    width = max(_LEAST_OUTPUTS, most // max(kept, 1))
    return (slice(start, start + width) for start in range(0, outputs, max(width, 1)))


@dataclass(frozen=True, slots=True)
class _HalvedRows:
    """Half of the rows kept in few bits, since the whole may overflow in half precision; (dim, features).

    No more of them is read at once than needed. They may be left rotated. With ``places`` they are spread over the
    rows of Y, (rows, features), with zeros between them.
    """

    stored: StoredRows
    in_one_pass: bool
    left_rotated: bool
    places: Tensor | None

    @property
    def rows(self) -> int:
        """Return how many rows there are."""
        return self.stored.rows if self.places is None else self.places.shape[0]

    def at_once(self, y: Tensor) -> bool:
        """Tell whether to read all rows for one GEMM.

        A GEMM in half precision rounds its result, which must not be added up. On an accelerator each step has its
        price. ∂x, which is made later, takes as much memory.
        """
        return y.dtype != compute_dtype(y.dtype) or not y.is_cpu

    def some(self, slab: slice, dtype: torch.dtype) -> Tensor:
        """Return half of some rows."""
        return read(self.stored, slab, dtype, scale=0.5, rotate_rows_back=not self.left_rotated, places=self.places)

    def all(self, dtype: torch.dtype) -> Tensor:
        """Return half of all rows; on a CPU with no helper tensor of their size in another type."""
        if self.in_one_pass or not self.stored.codes.is_cpu:
            return self.some(slice(None), dtype)
        rows = self.stored.codes.new_empty(self.rows, self.stored.features, dtype=dtype)
        for slab in row_slabs(*rows.shape):
            rows[slab] = self.some(slab, dtype)
        return rows

    def slabs(self) -> list[slice]:
        """Split the rows for a GEMM each."""
        few = self.rows * self.stored.features <= _FEW_VALUES
        height = max(_LEAST_READ, -(-self.rows // (1 if few else _READS)))
        return [slice(start, min(start + height, self.rows)) for start in range(0, max(self.rows, 1), height)]


def _rotate_back_(gradient: Tensor) -> None:
    """Undo the rotation of the rows on the gradient, in place, on a CPU a few rows of it at a time."""
    dtype = compute_dtype(gradient.dtype)
    for slab in row_slabs(*gradient.shape) if gradient.device.type == "cpu" else (slice(None),):
        for columns, groups in parts_of(gradient.shape[1]):
            part = gradient[slab, columns]
            turned = rotate_back(part.to(dtype).reshape(-1, *group_sizes(groups, part.shape[1])))
            part.copy_(turned.flatten(1))


def _add_outer(gradient: Tensor, total: Tensor, mean: Tensor) -> None:
    """Add total meanᵀ to the gradient in place, in the type of ``total``, without a second gradient in that type."""
    mean = mean.to(total.dtype)
    if gradient.dtype == total.dtype:
        gradient.addr_(total, mean)
        return
    for slab in row_slabs(*gradient.shape):
        gradient[slab] = gradient[slab].to(total.dtype).addr_(total[slab], mean)

"""The weight gradient that comes back from what was kept of an input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..config import SketchConfig
from ..numerics import compute_dtype, row_slabs
from ..sketches import Sketch, Whole
from ..sketches.rows import Rows
from ..storage.packing import unpack
from .keeping import drawn_on, sketch_for

_UNPACKED_ROWS = 512  # rows turned back from codes at once: enough for a good GEMM, few enough for memory used before
_LEAST_OUTPUTS = 256  # columns of Y compressed at once, at least


def weight_gradient(
    kept: tuple[Tensor, ...], y: Tensor, config: SketchConfig, in_features: int, valid: Tensor | None = None
) -> Tensor:
    """Return the unbiased estimate of Yᵀ X: kept, y (rows, out_features) -> (out_features, in_features)."""
    seed, *stored = kept
    sketch = drawn_on(y, sketch_for(config, len(y), seed, valid))
    rows = stored[0] if config.bits is None else _StoredRows(stored[0], stored[1], config.bits, in_features)
    gradient = _product(sketch, y, rows, in_features)
    if config.center and not config.keeps_input(len(y)):
        _add_outer(gradient, y.sum(0, dtype=compute_dtype(y.dtype)), stored[-1])
    return gradient


def _product(sketch: Sketch, y: Tensor, rows: Tensor | _StoredRows, in_features: int) -> Tensor:
    """Return gain · (Rᵀy)ᵀ · rows: (rows, out_features) -> (out_features, in_features)."""
    compress, gain = _compression(sketch, y), sketch.gain
    factor = 1.0 if isinstance(gain, Tensor) else gain
    if isinstance(rows, _StoredRows) and y.dtype != compute_dtype(y.dtype):
        rows, factor = rows.all_halved(y.dtype), 2 * factor
    out = y.new_empty(y.shape[1], in_features)
    for outputs in _output_slabs(sketch, y, in_features):
        part = compress(y[:, outputs])
        if isinstance(rows, _StoredRows):
            rows.product(part, factor, out=out[outputs])
        else:
            out[outputs].addmm_(part.t(), rows, beta=0, alpha=factor)
    return out.mul_(gain) if isinstance(gain, Tensor) else out


def _compression(sketch: Sketch, y: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what compresses some columns of y; which rows are picked is found out once for all of them."""
    return partial(sketch.pick, chosen=sketch.chosen(y.device)) if isinstance(sketch, Rows) else sketch.compress


def _output_slabs(sketch: Sketch, y: Tensor, in_features: int) -> Iterator[slice]:
    """Split the columns of y where all of them, compressed, would be larger than half of the input was.

    An exact layer has its input and the input's gradient at once: what stands here in their place must not be more. A
    layer with many outputs for its inputs, as lm_head is, would raise the peak of the step.
    """
    outputs = y.shape[1]
    most = len(y) * in_features // (2 if y.dtype == compute_dtype(y.dtype) else 8)  # rows may stand there unpacked too
    width = outputs
    if not isinstance(sketch, Whole) and sketch.dim * outputs > most:
        width = max(_LEAST_OUTPUTS, most // max(sketch.dim, 1))
    return (slice(start, start + width) for start in range(0, outputs, max(width, 1)))


@dataclass(frozen=True, slots=True)
class _StoredRows:
    """Kept rows in few bits, (dim, features), of which no more than needed is unpacked at once."""

    codes: Tensor
    ranges: Tensor
    bits: int
    features: int

    def halved(self, slab: slice, dtype: torch.dtype) -> Tensor:
        """Return half of some rows; the whole may overflow in half precision."""
        return unpack(self.codes[slab], self.ranges[slab], self.bits, self.features, dtype, scale=0.5)

    def all_halved(self, dtype: torch.dtype) -> Tensor:
        """Return half of all rows, with no helper tensor of their size in another type."""
        rows = self.codes.new_empty(len(self.codes), self.features, dtype=dtype)
        for slab in row_slabs(len(self.codes), self.features):
            rows[slab] = self.halved(slab, dtype)
        return rows

    def product(self, y: Tensor, factor: float, *, out: Tensor) -> None:
        """Put factor · yᵀ · rows in ``out``, some rows unpacked at a time: (dim, outputs) -> (outputs, features)."""
        for start in range(0, max(len(self.codes), 1), _UNPACKED_ROWS):
            slab = slice(start, start + _UNPACKED_ROWS)
            out.addmm_(y[slab].t(), self.halved(slab, out.dtype), beta=min(start, 1), alpha=2 * factor)


def _add_outer(gradient: Tensor, total: Tensor, mean: Tensor) -> None:
    """Add total meanᵀ to the gradient in place, in the type of ``total``, without a second gradient in that type."""
    mean = mean.to(total.dtype)
    if gradient.dtype == total.dtype:
        gradient.addr_(total, mean)
        return
    for slab in row_slabs(*gradient.shape):
        gradient[slab] = gradient[slab].to(total.dtype).addr_(total[slab], mean)

"""What is kept of an input, and the weight gradient that comes back from it.

Kept is a tuple of tensors, all that backward needs beside Y: the seed; the compressed rows, or their codes and ranges
when ``bits`` is set; the mean row when ``center`` is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .config import SketchConfig
from .seeds import generator_at
from .sketches import Sketch, Whole, make_sketch
from .sketches.base import Shapes, compute_dtype
from .sketches.rows import Rows, ValidRows
from .storage import pack, row_slabs, stored_bytes, unpack

SEED_BYTES = 8

_UNPACKED_ROWS = 512  # rows turned back from codes at once: enough for a good GEMM, few enough for memory used before
_LEAST_OUTPUTS = 256  # columns of Y compressed at once, at least
_DITHER_STREAM = 0x5DEECE66D  # keeps the dither's random numbers apart from the sketch's


def keep(x: Tensor, config: SketchConfig, seed: Tensor, valid: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return what to keep of x, the seed first: x (rows, in_features), valid (rows,) -> tensors."""
    sketch = _drawn_on(x, sketch_for(config, len(x), seed, valid))
    if isinstance(sketch, Whole) and config.bits is None:
        return seed, x
    mean: tuple[Tensor, ...] = (_mean_row(x, valid),) if config.center else ()
    if config.bits is not None and isinstance(sketch, (Rows, Whole)):
        return seed, *_packed(x, config.bits, _dither(x, seed), sketch, valid, *mean), *mean
    if valid is None or isinstance(sketch, ValidRows):  # which leaves out the others itself
        rows = sketch.compress(x)
    else:  # in two halves, since a copy of all of x would raise the peak of the step
        padded = ~valid.unsqueeze(1)
        rows = torch.cat([sketch.compress(half.masked_fill(padded, 0)) for half in x.chunk(2, 1)], 1)
    if config.center:
        ones = x.new_ones(len(x), 1) if valid is None else valid.unsqueeze(1).to(x.dtype)
        rows = torch.addmm(rows, sketch.compress(ones), mean[0].unsqueeze(0), alpha=-1)
    if config.bits is None:
        return seed, rows, *mean
    return seed, *pack(rows, config.bits, _dither(x, seed)), *mean


def weight_gradient(
    kept: tuple[Tensor, ...], y: Tensor, config: SketchConfig, in_features: int, valid: Tensor | None = None
) -> Tensor:
    """Return the unbiased estimate of Yᵀ X: kept, y (rows, out_features) -> (out_features, in_features)."""
    seed, *stored = kept
    sketch = _drawn_on(y, sketch_for(config, len(y), seed, valid))
    rows = stored[0] if config.bits is None else _StoredRows(stored[0], stored[1], config.bits, in_features)
    gradient = _product(sketch, y, rows, in_features)
    if config.center and not config.keeps_input(len(y)):
        _add_outer(gradient, y.sum(0, dtype=compute_dtype(y.dtype)), stored[-1])
    return gradient


def sketch_for(config: SketchConfig, rows: int, seed: Tensor, valid: Tensor | None = None) -> Sketch:
    """Return the sketch that both passes of one call use."""
    sketch = make_sketch(config.kind, rows, config.dim_for(rows), int(seed), config.block)
    if valid is not None and type(sketch) is Rows:
        return ValidRows(sketch.rows, sketch.dim, sketch.seed, valid)
    return sketch


def kept_bytes(config: SketchConfig, rows: int, in_features: int, itemsize: int) -> int:
    """Return how many bytes ``keep`` keeps of an input, the seed included."""
    mean = in_features * itemsize if config.center and not config.keeps_input(rows) else 0
    return stored_bytes(config.dim_for(rows), in_features, config.bits, itemsize) + mean + SEED_BYTES


def _drawn_on(x: Tensor, sketch: Sketch) -> Sketch:
    """Return the sketch itself, or on the meta device, where few kinds can be drawn, what has its sizes."""
    drawn = not x.is_meta or isinstance(sketch, (Whole, Rows))
    return sketch if drawn else Shapes(sketch.rows, sketch.dim, sketch.seed)


def _mean_row(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean of the valid rows, rounded as it is kept so that both passes use the same: (in_features,)."""
    dtype = compute_dtype(x.dtype)
    if valid is None:
        return (x.sum(0, dtype=dtype) / max(len(x), 1)).to(x.dtype)
    total = x.new_zeros(x.shape[1], dtype=dtype)
    for slab in row_slabs(*x.shape):
        total += x[slab].masked_fill(~valid[slab].unsqueeze(1), 0).sum(0, dtype=dtype)
    return (total / valid.sum().clamp(min=1)).to(x.dtype)


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
    outputs, most = y.shape[1], len(y) * in_features // 2
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


def _packed(
    x: Tensor,
    bits: int,
    dither: torch.Generator | None,
    sketch: Rows | Whole,
    valid: Tensor | None,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return codes and ranges of the rows that a sketch picks, those that do not count as zeros; none are copied."""
    chosen = sketch.chosen(x.device) if isinstance(sketch, Rows) else None
    codes, ranges = pack(x, bits, dither, chosen, mean)
    if valid is not None:
        counted = valid if chosen is None else valid.index_select(0, chosen)
        ranges.masked_fill_(~counted.view(-1, 1, 1), 0)
    return codes, ranges


def _dither(x: Tensor, seed: Tensor) -> torch.Generator | None:
    """Return the generator of the random numbers that rounding x takes; there is none for meta."""
    return None if x.is_meta else generator_at(int(seed) ^ _DITHER_STREAM, x.device)

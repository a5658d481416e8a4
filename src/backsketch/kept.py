"""What is kept of an input, and the weight gradient that comes back from it.

Kept is a tuple of tensors, all that backward needs beside Y: the seed; the compressed rows, or their codes and ranges
when ``bits`` is set; the mean row when ``center`` is.
"""

from __future__ import annotations

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
_DITHER_STREAM = 0x5DEECE66D  # keeps the dither's random numbers apart from the sketch's


def keep(x: Tensor, config: SketchConfig, seed: Tensor, valid: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return what to keep of x, the seed first: x (rows, in_features), valid (rows,) -> tensors."""
    sketch = _drawn_on(x, sketch_for(config, len(x), seed, valid))
    if isinstance(sketch, Whole) and config.bits is None:
        return seed, x
    if config.bits is not None and isinstance(sketch, (Rows, Whole)) and not config.center:
        return seed, *_packed(x, config.bits, _dither(x, seed), sketch, valid)
    counted = x
    if valid is not None and not isinstance(sketch, ValidRows):  # which leaves out the others itself
        counted = x.masked_fill(~valid.unsqueeze(1), 0)
    rows = sketch.compress(counted)
    mean: tuple[Tensor, ...] = ()
    if config.center:
        mean = (_mean_row(x, valid),)
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
    compressed = sketch.compress(y)
    if config.bits is None:
        gradient = _product(compressed, stored[0], sketch.gain)
    else:
        gradient = _packed_product(compressed, stored[0], stored[1], config.bits, in_features, sketch.gain)
    if config.center and not config.keeps_input(len(y)):
        total = y.sum(0, dtype=compute_dtype(y.dtype))
        gradient = gradient.to(total.dtype).addr_(total, stored[-1].to(total.dtype)).to(y.dtype)
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
    drawn = not x.is_meta or type(sketch) in (Whole, Rows)
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


def _product(y: Tensor, x: Tensor, gain: float | Tensor) -> Tensor:
    """Return gain · yᵀx: (dim, out_features), (dim, in_features) -> (out_features, in_features)."""
    if isinstance(gain, Tensor):
        return (y.t() @ x).mul_(gain)
    if gain == 1:
        return y.t() @ x
    return y.new_empty(y.shape[1], x.shape[1]).addmm_(y.t(), x, beta=0, alpha=gain)


def _packed_product(y: Tensor, codes: Tensor, ranges: Tensor, bits: int, features: int, gain: float | Tensor) -> Tensor:
    """Return gain · yᵀx with x unpacked slab by slab, so that it never stands there whole."""
    dtype = compute_dtype(y.dtype)
    out = y.new_empty(y.shape[1], features, dtype=dtype)
    factor = 2.0 if isinstance(gain, Tensor) else 2.0 * gain  # rows come back halved, since whole they may overflow
    for start in range(0, max(len(codes), 1), _UNPACKED_ROWS):
        slab = slice(start, start + _UNPACKED_ROWS)
        rows = unpack(codes[slab], ranges[slab], bits, features, y.dtype, scale=0.5)
        if dtype == y.dtype:
            out.addmm_(y[slab].t(), rows, beta=min(start, 1), alpha=factor)
        else:
            product = (y[slab].t() @ rows).to(dtype)
            out = out.add_(product, alpha=factor) if start else product.mul_(factor)
    return (out.mul_(gain) if isinstance(gain, Tensor) else out).to(y.dtype)


def _packed(
    x: Tensor, bits: int, dither: torch.Generator | None, sketch: Rows | Whole, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes and ranges of the rows that a sketch picks, those that do not count as zeros; none are copied."""
    chosen = sketch.chosen(x.device) if isinstance(sketch, Rows) else None
    codes, ranges = pack(x, bits, dither, chosen)
    if valid is not None:
        counted = valid if chosen is None else valid.index_select(0, chosen)
        ranges.masked_fill_(~counted.view(-1, 1, 1), 0)
    return codes, ranges


def _dither(x: Tensor, seed: Tensor) -> torch.Generator | None:
    """Return the generator of the random numbers that rounding x takes; there is none for meta."""
    return None if x.is_meta else generator_at(int(seed) ^ _DITHER_STREAM, x.device)

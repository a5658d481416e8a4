"""What is kept of an input, and the weight gradient that comes back from it.

Kept is a tuple of tensors, all that backward needs beside Y: the seed; the compressed rows, or their codes and ranges
when ``bits`` is set; the mean row when ``center`` is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import SketchConfig
from .sketches import Sketch, Whole, make_sketch
from .sketches.base import Shapes, compute_dtype
from .sketches.rows import Rows, ValidRows
from .storage import pack, row_slabs, stored_bytes, unpack

_UNPACKED_ROWS = 2048  # rows turned back from codes at once: few enough to be small, enough for a good GEMM
_DITHER_STREAM = 0x5DEECE66D  # keeps the dither's random numbers apart from the sketch's


def keep(x: Tensor, config: SketchConfig, seed: Tensor, valid: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return what to keep of x, the seed first: x (rows, in_features), valid (rows,) -> tensors."""
    sketch = _drawn_on(x, sketch_for(config, len(x), seed, valid))
    if isinstance(sketch, Whole) and config.bits is None:
        return seed, x
    if valid is not None and not isinstance(sketch, ValidRows):
        x = x.masked_fill(~valid.unsqueeze(1), 0)
    rows = sketch.compress(x)
    mean: tuple[Tensor, ...] = ()
    if config.center:
        mean = (_mean_row(x, valid),)
        ones = x.new_ones(len(x), 1) if valid is None else valid.unsqueeze(1).to(x.dtype)
        rows = torch.addmm(rows, sketch.compress(ones), mean[0].unsqueeze(0), alpha=-1)
    if config.bits is None:
        return seed, rows, *mean
    generator = None if x.is_meta else torch.Generator(device=x.device).manual_seed(int(seed) ^ _DITHER_STREAM)
    return seed, *pack(rows, config.bits, generator), *mean


def weight_gradient(
    kept: tuple[Tensor, ...], y: Tensor, config: SketchConfig, in_features: int, valid: Tensor | None = None
) -> Tensor:
    """Return the unbiased estimate of Yᵀ X: kept, y (rows, out_features) -> (out_features, in_features)."""
    seed, *stored = kept
    sketch = _drawn_on(y, sketch_for(config, len(y), seed, valid))
    compressed = sketch.compress(y)
    exact = isinstance(sketch, Whole) and config.bits is None
    if config.bits is None:
        gradient = _product(compressed, stored[0], sketch.gain)
    else:
        gradient = _packed_product(compressed, stored[0], stored[1], config.bits, in_features, sketch.gain)
    if config.center and not exact:
        total = y.sum(0, dtype=compute_dtype(y.dtype))
        gradient = gradient.to(total.dtype).addr_(total, stored[-1].to(total.dtype)).to(y.dtype)
    return gradient


def sketch_for(config: SketchConfig, rows: int, seed: Tensor, valid: Tensor | None = None) -> Sketch:
    """Return the sketch that both passes of one call use."""
    sketch = make_sketch(config.kind, rows, config.dim_for(rows), int(seed), config.block)
    if valid is not None and type(sketch) is Rows:
        return ValidRows(sketch.rows, sketch.dim, sketch.seed, valid)
    return sketch


def _drawn_on(x: Tensor, sketch: Sketch) -> Sketch:
    """Return the sketch itself, or on the meta device what has its sizes."""
    return Shapes(sketch.rows, sketch.dim, sketch.seed) if x.is_meta and not isinstance(sketch, Whole) else sketch


def kept_bytes(config: SketchConfig, rows: int, in_features: int, itemsize: int) -> int:
    """Return how many bytes ``keep`` keeps of an input, the seed included."""
    dim = config.dim_for(rows)
    exact = dim == rows and config.bits is None
    mean = in_features * itemsize if config.center and not exact else 0
    return stored_bytes(dim, in_features, config.bits, itemsize) + mean + 8


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
    out = y.new_zeros(y.shape[1], features, dtype=dtype)
    for start in range(0, len(codes), _UNPACKED_ROWS):
        slab = slice(start, start + _UNPACKED_ROWS)
        rows = unpack(codes[slab], ranges[slab], bits, features, y.dtype)
        if dtype == y.dtype:
            out.addmm_(y[slab].t(), rows)
        else:
            out.add_(y[slab].t() @ rows)
    return out.mul_(gain).to(y.dtype)

"""What is kept of an input.

Kept is a tuple of tensors, all that backward needs beside Y: the seed; the compressed rows, or their codes and ranges
when ``bits`` is set; the mean row when ``center`` is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import SketchConfig
from ..numerics import compute_dtype, row_slabs
from ..seeds import generator_at
from ..sketches import Sketch, Whole, make_sketch
from ..sketches.base import Shapes
from ..sketches.rows import Rows, ValidRows
from ..storage.packing import pack, stored_bytes

SEED_BYTES = 8

_MOST_PARTS = 16  # of a masked input, each sketched on its own
_DITHER_STREAM = 0x5DEECE66D  # keeps the dither's random numbers apart from the sketch's


def keep(x: Tensor, config: SketchConfig, seed: Tensor, valid: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return what to keep of x, the seed first: x (rows, in_features), valid (rows,) -> tensors."""
    sketch = drawn_on(x, sketch_for(config, len(x), seed, valid))
    if isinstance(sketch, Whole) and config.bits is None:
        return seed, x
    mean: tuple[Tensor, ...] = (_mean_row(x, valid),) if config.center else ()
    if config.bits is not None and isinstance(sketch, (Rows, Whole)):
        return seed, *_packed(x, config.bits, _dither(x, seed), sketch, valid, *mean), *mean
    if valid is None or isinstance(sketch, ValidRows):  # which leaves out the others itself
        rows = sketch.compress(x)
    else:  # some columns at a time, since a copy of all of x would raise the peak of the step
        rows, padded = x.new_empty(sketch.dim, x.shape[1]), ~valid.unsqueeze(1)
        parts = min(_MOST_PARTS, -(-(len(x) + sketch.dim) // max(len(x) - sketch.dim, 1)))  # together less than x
        for part, target in zip(x.chunk(parts, 1), rows.chunk(parts, 1), strict=True):
            target.copy_(sketch.compress(part.masked_fill(padded, 0)))
    if config.center:
        ones = x.new_ones(len(x), 1) if valid is None else valid.unsqueeze(1).to(x.dtype)
        rows.addmm_(sketch.compress(ones), mean[0].unsqueeze(0), alpha=-1)
    if config.bits is None:
        return seed, rows, *mean
    return seed, *pack(rows, config.bits, _dither(x, seed)), *mean


def sketch_for(config: SketchConfig, rows: int, seed: Tensor, valid: Tensor | None = None) -> Sketch:
    """Return the sketch that both passes of one call use."""
    sketch = make_sketch(config.kind, rows, config.dim_for(rows), int(seed), config.block)
    return sketch if valid is None else sketch.among(valid)


def kept_bytes(config: SketchConfig, rows: int, in_features: int, itemsize: int) -> int:
    """Return how many bytes ``keep`` keeps of an input, the seed included."""
    mean = in_features * itemsize if config.center and not config.keeps_input(rows) else 0
    return stored_bytes(config.dim_for(rows), in_features, config.bits, itemsize) + mean + SEED_BYTES


def drawn_on(x: Tensor, sketch: Sketch) -> Sketch:
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

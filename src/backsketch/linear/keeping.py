"""What is kept of an input.

Kept is a tuple of tensors, all that backward needs beside Y: the seed; the compressed rows, or their codes and ranges
when ``bits`` is set; the mean row when ``center`` is.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..config import SketchConfig
from ..numerics import compute_dtype, row_slabs
from ..seeds import seed_value
from ..sketches import Sketch, Whole, make_sketch
from ..sketches.base import Shapes
from ..sketches.rows import Rows, ValidRows
from ..storage.groups import GROUP, group_count
from ..storage.packing import write
from ..storage.sizes import stored_bytes
from ..storage.stored_rows import StoredRows

SEED_BYTES = 8

_MOST_PARTS = 16  # of an input, each sketched on its own


def keep(x: Tensor, config: SketchConfig, seed: Tensor, valid: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return what to keep of x, the seed first: x (rows, in_features), valid (rows,) -> tensors."""
    sketch = drawn_on(x, sketch_for(config, x.shape[0], seed, valid))
    if isinstance(sketch, Whole) and config.bits is None:
        return seed, x
    mean: tuple[Tensor, ...] = (_mean_row(x, valid),) if config.center else ()
    if config.bits is None:
        return seed, _compressed(x, sketch, valid, *mean), *mean
    stored = StoredRows.empty(x, sketch.dim, x.shape[1], config.bits, config.rotate, seed_value(seed))
    if isinstance(sketch, (Rows, Whole)):
        _store_picked(stored, x, sketch, valid, *mean)
    else:
        # Stored rows take up to 5/8 of what they are made of, of 8 bits in half precision.
        _compress_parts(
            x, sketch, valid, 5 * sketch.dim // 8, lambda at, part: write(stored, part, first_column=at.start), *mean
        )
    return seed, stored.codes, stored.ranges, *mean


def sketch_for(config: SketchConfig, rows: int, seed: Tensor, valid: Tensor | None = None) -> Sketch:
    """Return the sketch that both passes of one call use."""
    sketch = make_sketch(config.kind, rows, config.dim_for(rows), seed_value(seed), config.block)
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


def _store_picked(
    stored: StoredRows, x: Tensor, sketch: Rows | Whole, valid: Tensor | None, mean: Tensor | None = None
) -> None:
    """Store the rows that a sketch picks, those that do not count as zeros; none are copied."""
    chosen = sketch.chosen(x.device) if isinstance(sketch, Rows) else None
    write(stored, x, chosen, mean)
    if valid is not None:
        counted = valid if chosen is None else valid.index_select(0, chosen)
        stored.ranges.masked_fill_(~counted.view(-1, 1, 1), 0)


def _compressed(x: Tensor, sketch: Sketch, valid: Tensor | None, mean: Tensor | None = None) -> Tensor:
    """Return what the sketch makes of x, without the mean row: (dim, in_features)."""
    if valid is not None and not isinstance(sketch, ValidRows):  # which leaves out the others itself
        out = x.new_empty(sketch.dim, x.shape[1])
        _compress_parts(x, sketch, valid, sketch.dim, lambda columns, part: out[:, columns].copy_(part), mean)
        return out
    rows = sketch.compress(x)
    return rows if mean is None else _take_off(rows, mean, _compressed_ones(x, sketch, valid))


def _compress_parts(
    x: Tensor,
    sketch: Sketch,
    valid: Tensor | None,
    kept: int,
    store: Callable[[slice, Tensor], object],
    mean: Tensor | None = None,
) -> None:
    """Call ``store`` with some columns at a time and what the sketch makes of them, without the mean row.

    In as many parts as keep the peak of the step: a masked copy of x, its sketch and the ``kept`` rows together take
    no more than x. No part outlives its turn.
    """
    rows, features = x.shape
    copied = sketch.dim + (0 if valid is None else rows)
    parts = min(_MOST_PARTS, -(-copied // max(rows - kept, 1)))
    width = -(-group_count(features) // parts) * GROUP
    padded = None if valid is None else ~valid.unsqueeze(1)
    ones = None if mean is None else _compressed_ones(x, sketch, valid)
    for start in range(0, features, width):
        columns = slice(start, min(start + width, features))
        part = sketch.compress(x[:, columns] if padded is None else x[:, columns].masked_fill(padded, 0))
        store(columns, part if mean is None or ones is None else _take_off(part, mean[columns], ones))
        del part


def _compressed_ones(x: Tensor, sketch: Sketch, valid: Tensor | None) -> Tensor:
    """Return what the sketch makes of a column of ones, one for each row that counts: (dim, 1)."""
    return sketch.compress(x.new_ones(len(x), 1) if valid is None else valid.unsqueeze(1).to(x.dtype))


def _take_off(rows: Tensor, mean: Tensor, ones: Tensor) -> Tensor:
    """Take the mean row off sketched rows, in place, and return them."""
    return rows.addmm_(ones, mean.unsqueeze(0), alpha=-1)

"""The fused form on a GPU: rows to codes and back in one pass, as Triton kernels. Imported only where Triton is.

A program holds some rows of one group as (8 slots, rows, 16 lanes). Folding halves a list of codes three times at most,
so that a slot's number, in binary, tells in which half its values are at each fold: the codes of a byte are in the
same row and lane of different slots. Slots come first, since Triton then keeps all of them in the registers of one
thread, and what they have in common (ranges, folds, most of the rotation) takes no exchange between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import (
    GROUP,
    LANES,
    SLOTS,
    columns,
    dither,
    down,
    from_upper_half,
    load_plane,
    rotate,
    row_words,
    store_plane,
    upper_half,
)


@triton.jit(do_not_specialize=["slope", "offset", "rows", "full", "first_group"])
def pack_kernel(
    x,
    chosen,
    mean,
    codes,
    ranges,
    line,
    matrix,
    slope,
    offset,
    rows,
    full,
    first_group,
    x_row_stride,
    x_column_stride,
    codes_stride,
    ranges_stride,
    REST: tl.constexpr,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store some rows of one of the ``full`` groups, or of a shorter one of REST values behind them."""
    groups = full + (1 if REST > 0 else 0)
    group = (tl.program_id(0) % groups).to(tl.int64)
    row = (tl.program_id(0) // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    word = row_words(row, line, slope, offset)
    source = row if chosen is None else tl.load(chosen + row, mask=exists, other=0)
    x += source * x_row_stride + group * GROUP * x_column_stride
    if mean is not None:
        mean += group * GROUP
    group += first_group
    codes += row * codes_stride + group * (LANES * BITS)
    ranges += row * ranges_stride + group * 2
    if group < first_group + full:
        _pack_group(x, mean, codes, ranges, matrix, word, group, exists, x_column_stride, GROUP, BITS, ROTATED, ROWS)
    elif REST > 0:
        _pack_group(x, mean, codes, ranges, matrix, word, group, exists, x_column_stride, REST, BITS, ROTATED, ROWS)


@triton.jit(do_not_specialize=["slope", "offset", "first", "rows", "full", "first_group"])
def unpack_kernel(
    codes,
    ranges,
    places,
    out,
    line,
    matrix,
    slope,
    offset,
    scale,
    first,
    rows,
    full,
    first_group,
    codes_stride,
    ranges_stride,
    out_stride,
    REST: tl.constexpr,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    TURN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Read some rows of one of the ``full`` groups, or of a shorter one of REST values behind them."""
    groups = full + (1 if REST > 0 else 0)
    group = (tl.program_id(0) % groups).to(tl.int64)
    row = (tl.program_id(0) // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    out += row * out_stride + group * GROUP
    group += first_group
    source = first + row
    present = exists
    if places is not None:
        source = tl.load(places + source, mask=exists, other=-1)
        present = source >= 0
    word = row_words(source, line, slope, offset)
    codes += source * codes_stride + group * (LANES * BITS)
    ranges += source * ranges_stride + group * 2
    if group < first_group + full:
        _unpack_group(codes, ranges, out, matrix, word, group, scale, exists, present, GROUP, BITS, ROTATED, TURN, ROWS)
    elif REST > 0:
        _unpack_group(codes, ranges, out, matrix, word, group, scale, exists, present, REST, BITS, ROTATED, TURN, ROWS)


@triton.jit
def _pack_group(
    x,
    mean,
    codes,
    ranges,
    matrix,
    word,
    group,
    exists,
    x_column_stride,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    ROWS: tl.constexpr,
):
    column, valid = columns(SLOTS, SIZE)
    here = valid & exists[None, :, None]
    values = tl.load(x[None, :, None] + column.to(tl.int64) * x_column_stride, mask=here, other=0.0).to(tl.float32)
    if mean is not None:
        # In the shape of the values: a smaller one would have a layout of its own, and the values take it over.
        values -= tl.load(mean + tl.broadcast_to(column, (SLOTS, ROWS, LANES)), mask=here, other=0.0).to(tl.float32)
    if ROTATED:
        values = rotate(values, matrix, column, valid, SIZE, False, ROWS)

    levels: tl.constexpr = 2**BITS - 1
    smallest = tl.min(tl.min(tl.where(valid, values, float("inf")), 0), 1)
    largest = tl.max(tl.max(tl.where(valid, values, float("-inf")), 0), 1)
    nan = tl.max(tl.max((values != values).to(tl.int32), 0), 1)
    least = down(tl.where(nan != 0, float("nan"), smallest))
    steps = tl.full((ROWS,), levels, tl.float32)
    share = tl.full((ROWS,), (1 + 2.0**-20) / levels, tl.float32)
    if not ROTATED:
        others = tl.sum(tl.sum((valid & (values != 0)).to(tl.int32), 0), 1)
        if BITS >= 4:
            zeros = (least == 0) & (others < SIZE)
        else:
            zeros = (least == 0) & (others * levels**2 < SIZE * (levels - 1) ** 2)
        steps = tl.where(zeros, levels - 1.0, steps)
        share = tl.where(zeros, (1 + 2.0**-20) / (levels - 1), share)
    step = 0.0 - down(0.0 - (largest - least) * share)
    inverse = tl.div_rn(1.0, step)
    inverse = tl.where(inverse == float("inf"), 0.0, inverse)

    level = (values - least[None, :, None]) * inverse[None, :, None] + dither(word, group, column)
    # NaN becomes 0: the codes of such a group too must keep to their bits.
    code = tl.minimum(tl.maximum(level, 0.0), steps[None, :, None]).to(tl.int32)
    if not ROTATED:
        code = tl.where(zeros[None, :, None], tl.where(values == 0, 0, code + 1), code)
        step = tl.where(zeros, step * -1.0, step)
    tl.store(ranges, upper_half(least), mask=exists)
    tl.store(ranges + 1, upper_half(step), mask=exists)
    code = tl.where(valid, code, 0)
    if BITS == 3:
        store_plane(codes, code & 3, exists, 2, SIZE, ROWS)
        store_plane(codes + (2 * SIZE + 7) // 8, code >> 2, exists, 1, SIZE, ROWS)
    else:
        store_plane(codes, code, exists, BITS, SIZE, ROWS)


@triton.jit
def _unpack_group(
    codes,
    ranges,
    out,
    matrix,
    word,
    group,
    scale,
    exists,
    present,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    TURN: tl.constexpr,
    ROWS: tl.constexpr,
):
    column, valid = columns(SLOTS, SIZE)
    if BITS == 3:
        code = load_plane(codes, present, 2, SIZE, ROWS)
        code |= load_plane(codes + (2 * SIZE + 7) // 8, present, 1, SIZE, ROWS) << 2
    else:
        code = load_plane(codes, present, BITS, SIZE, ROWS)
    least = from_upper_half(tl.load(ranges, mask=present, other=0)) * scale
    step = from_upper_half(tl.load(ranges + 1, mask=present, other=0)) * scale
    half = 0.5
    if not ROTATED:
        zeros = (step.to(tl.int32, bitcast=True) < 0) & (step == step)
        half = tl.where(zeros, -0.5, 0.5)
        step = tl.abs(step)
    base = least + step * half
    values = (code.to(tl.float32) - dither(word, group, column)) * step[None, :, None] + base[None, :, None]
    if not ROTATED:
        values = tl.where(zeros[None, :, None] & (code == 0), 0.0, values)
    if TURN:
        values = rotate(tl.where(valid, values, 0.0), matrix, column, valid, SIZE, True, ROWS)
    tl.store(out[None, :, None] + column, values.to(out.dtype.element_ty), mask=valid & exists[None, :, None])

"""Slopes to codes, and gradients times slopes, in one pass each on a GPU. Imported only where Triton is.

A program takes ROWS groups, held as in ``triton_kernels``: (8 slots, rows, 16 lanes). The last group of a tensor may be
shorter; only the program that has it asks for sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import GROUP, LANES, SLOTS, columns, dither, fold, row_words, short_columns, unfold

GIVEN = tl.constexpr(0)  # the slopes themselves
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
SILU = tl.constexpr(3)
SIGMOID = tl.constexpr(4)
TANH = tl.constexpr(5)


@triton.jit(do_not_specialize=["slope", "offset", "count"])
def pack_slopes_kernel(
    x,
    codes,
    line,
    slope,
    offset,
    count,
    low,
    per_step,
    FUNCTION: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store the slopes of ``count`` values: (count,) -> (bytes,)."""
    row, word, size = _rows(line, slope, offset, count, ROWS)
    x += (row * GROUP)[None, :, None]
    codes += (row * (LANES * BITS))[None, :, None]
    if _all_full(count, ROWS):
        _pack(x, codes, word, size, low, per_step, FUNCTION, BITS, False, ROWS)
    else:
        _pack(x, codes, word, size, low, per_step, FUNCTION, BITS, True, ROWS)


@triton.jit(do_not_specialize=["slope", "offset", "count"])
def times_slopes_kernel(
    grad,
    codes,
    out,
    line,
    slope,
    offset,
    count,
    step,
    base,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Multiply a gradient by the slopes that were stored: (count,) -> (count,)."""
    row, word, size = _rows(line, slope, offset, count, ROWS)
    grad += (row * GROUP)[None, :, None]
    out += (row * GROUP)[None, :, None]
    codes += (row * (LANES * BITS))[None, :, None]
    if _all_full(count, ROWS):
        _multiply(grad, codes, out, word, size, step, base, BITS, False, ROWS)
    else:
        _multiply(grad, codes, out, word, size, step, base, BITS, True, ROWS)


@triton.jit
def _rows(line, slope, offset, count, ROWS: tl.constexpr):
    """Return the numbers of a program's groups, what each adds to the dither, and how many values it has, or none."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    size = tl.minimum(tl.maximum(count - row * GROUP, 0), GROUP).to(tl.int32)[None, :, None]
    return row, row_words(row, line, slope, offset), size


@triton.jit
def _all_full(count, ROWS: tl.constexpr):
    return (tl.program_id(0).to(tl.int64) + 1) * (ROWS * GROUP) <= count


@triton.jit
def _columns(COUNT: tl.constexpr, size, SHORT: tl.constexpr):
    if SHORT:
        column, valid = short_columns(COUNT, size)
    else:
        column, valid = columns(COUNT, GROUP)
    return column, valid


@triton.jit
def _pack(
    x,
    codes,
    word,
    size,
    low,
    per_step,
    FUNCTION: tl.constexpr,
    BITS: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
):
    column, valid = _columns(SLOTS, size, SHORT)
    values = tl.load(x + column, mask=valid, other=0.0).to(tl.float32)
    level = (_slopes(values, FUNCTION) - low) * per_step + dither(word, 0, column)
    code = tl.minimum(tl.maximum(level, 0.0), 2.0**BITS - 1).to(tl.int32)  # NaN becomes 0
    code = tl.where(valid, code, 0)
    if BITS == 3:
        _store(codes, code & 3, size, 2, SHORT, ROWS)
        _store(codes + _low_bytes(size, SHORT), code >> 2, size, 1, SHORT, ROWS)
    else:
        _store(codes, code, size, BITS, SHORT, ROWS)


@triton.jit
def _multiply(
    grad,
    codes,
    out,
    word,
    size,
    step,
    base,
    BITS: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
):
    column, valid = _columns(SLOTS, size, SHORT)
    if BITS == 3:
        code = _load(codes, size, 2, SHORT, ROWS)
        code |= _load(codes + _low_bytes(size, SHORT), size, 1, SHORT, ROWS) << 2
    else:
        code = _load(codes, size, BITS, SHORT, ROWS)
    slopes = (code.to(tl.float32) - dither(word, 0, column)) * step + base
    product = tl.load(grad + column, mask=valid, other=0.0).to(tl.float32) * slopes
    tl.store(out + column, product.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _low_bytes(size, SHORT: tl.constexpr):
    """Return how many bytes the two lower bits of the codes take, before the third ones."""
    return (2 * size + 7) // 8 if SHORT else 2 * LANES


@triton.jit
def _store(to, code, size, WIDTH: tl.constexpr, SHORT: tl.constexpr, ROWS: tl.constexpr):
    place, valid = _columns(WIDTH, size, SHORT)
    tl.store(to + place, fold(code, WIDTH, ROWS), mask=valid)


@triton.jit
def _load(at, size, WIDTH: tl.constexpr, SHORT: tl.constexpr, ROWS: tl.constexpr):
    place, valid = _columns(WIDTH, size, SHORT)
    return unfold(tl.load(at + place, mask=valid, other=0), WIDTH, ROWS)


@triton.jit
def _slopes(x, FUNCTION: tl.constexpr):
    """Return f′(x). Where |x| is large it is constant, and infinity times zero is avoided."""
    if FUNCTION != GIVEN:
        x = tl.minimum(tl.maximum(x, -80.0), 80.0)
    if FUNCTION == GELU:
        x = (0.5 + 0.5 * tl.erf(x * 0.7071067811865476)) + x * (tl.exp(-0.5 * x * x) * 0.3989422804014327)
    elif FUNCTION == GELU_TANH:
        share = _sigmoid(x * (1.5957691216057308 + 0.07135481627159471 * x * x))
        x = share + x * (share * (1 - share)) * (1.5957691216057308 + 0.21406444881478412 * x * x)
    elif FUNCTION == SILU:
        share = _sigmoid(x)
        x = share * (1 + x * (1 - share))
    elif FUNCTION == SIGMOID:
        share = _sigmoid(x)
        x = share * (1 - share)
    elif FUNCTION == TANH:
        share = _sigmoid(2 * x)
        x = 4 * share * (1 - share)
    return x


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))

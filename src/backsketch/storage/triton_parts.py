"""What the Triton kernels are made of, for values held as (slots, rows, lanes).

Names in capitals are constants when a kernel is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(128)
SLOTS = tl.constexpr(8)
LANES = tl.constexpr(16)
VECTOR = tl.constexpr(4)  # neighbouring values of a thread: 16 bytes of fp32; with more, registers run short


@triton.jit
def columns(COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Return where the values of a group stand, or its bytes after folding to COUNT slots, and whether there are any.

    Halves are rounded up where a size is odd.
    """
    slot = tl.arange(0, COUNT)[:, None, None]
    lane = tl.arange(0, LANES)[None, None, :]
    if SIZE % 32 == 0:  # the same as below, in a form that shows what is contiguous
        # A thread takes as many neighbouring bytes as values, so that no code changes threads on its way to its byte.
        column = tl.max_contiguous(slot * (SIZE // 8) + lane, (1, 1, VECTOR))
        valid = lane < SIZE // 8
    else:
        column, valid = short_columns(COUNT, SIZE)
    return column, valid


@triton.jit
def short_columns(COUNT: tl.constexpr, size):
    """Return what ``columns`` returns for groups of any size, which may be known only to the running kernel."""
    slot = tl.arange(0, COUNT)[:, None, None]
    lane = tl.arange(0, LANES)[None, None, :]
    half = (size + 1) // 2
    quarter = (half + 1) // 2
    eighth = (quarter + 1) // 2
    in_quarter = (slot & 1) * eighth + lane
    in_half = (slot >> 1 & 1) * quarter + in_quarter
    column = (slot >> 2) * half + in_half
    valid = (lane < eighth) & (in_quarter < quarter) & (in_half < half) & (column < size)
    return column, valid


@triton.jit
def _shifts(WIDTH: tl.constexpr):
    """Return by how many bits the codes of each slot are shifted in their byte: (SLOTS, 1, 1)."""
    slot = tl.arange(0, SLOTS)[:, None, None]
    shift = (slot >> 2) * WIDTH
    if WIDTH <= 2:
        shift += (slot >> 1 & 1) * (2 * WIDTH)
    if WIDTH == 1:
        shift += (slot & 1) * (4 * WIDTH)
    return shift


@triton.jit
def store_plane(to, code, exists, WIDTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Fold codes of WIDTH bits and store them."""
    place, valid = columns(WIDTH, SIZE)
    tl.store(to[None, :, None] + place, fold(code, WIDTH, ROWS), mask=valid & exists[None, :, None])


@triton.jit
def load_plane(at, present, WIDTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Load codes that were folded, and unfold them: (SLOTS, ROWS, LANES)."""
    place, valid = columns(WIDTH, SIZE)
    joined = tl.load(at[None, :, None] + place, mask=valid & present[None, :, None], other=0)
    return unfold(joined, WIDTH, ROWS)


@triton.jit
def fold(code, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Return codes of WIDTH bits as bytes, which fill WIDTH slots: (SLOTS, ROWS, LANES) -> (WIDTH, ROWS, LANES)."""
    if WIDTH < 8:
        parts = tl.reshape(code << _shifts(WIDTH), (SLOTS // WIDTH, WIDTH * ROWS * LANES))
        code = tl.reshape(tl.sum(parts, 0), (WIDTH, ROWS, LANES))
    return code.to(tl.uint8)


@triton.jit
def unfold(joined, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Undo ``fold``: (WIDTH, ROWS, LANES) -> (SLOTS, ROWS, LANES)."""
    code = joined.to(tl.int32)
    if WIDTH < 8:
        parts = tl.broadcast_to(code[None, :, :, :], (SLOTS // WIDTH, WIDTH, ROWS, LANES))
        code = tl.reshape(parts, (SLOTS, ROWS, LANES)) >> _shifts(WIDTH) & (2**WIDTH - 1)
    return code


@triton.jit
def down(x):
    """Return the largest bf16 number that is not above x; NaN for what is not finite."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + (bits >> 31 & 0xFFFF)) & -0x10000
    cut = bits.to(tl.float32, bitcast=True) + 0.0  # not -0.0
    # Not x - x in place of the question: as a part of a fused multiply-add that would not be 0.
    return tl.where(tl.abs(x) < float("inf"), cut, float("nan"))


@triton.jit
def upper_half(x):
    """Return a bf16 number, held in fp32, as its 16 bits."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit
def from_upper_half(bits):
    """Undo ``upper_half``."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


# ---- Rotation: by butterflies. tl.dot in full precision holds whole operands in registers, and takes 128 products for
# 7 sums; a butterfly takes one exchange between threads, or none where both values are in one thread.


@triton.jit
def rotate(values, matrix, column, valid, SIZE: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr):
    """Rotate groups, or rotate them back; zeros stand where values are not valid."""
    if matrix is None or SIZE == GROUP:
        turned = values * SIZE**-0.5  # before the sums, which could overflow else
        minus = _minus(column)
        if not BACK:
            turned = tl.where(minus, -turned, turned)
        if SIZE >= 2 * SLOTS:
            turned = _butterfly(turned, 1, ROWS)
        if SIZE >= 4 * SLOTS:
            turned = _butterfly(turned, 2, ROWS)
        if SIZE >= 8 * SLOTS:
            turned = _butterfly(turned, 4, ROWS)
        if SIZE >= 16 * SLOTS:
            turned = _butterfly(turned, 8, ROWS)
        turned = _butterfly(turned, ROWS * LANES, ROWS)
        turned = _butterfly(turned, ROWS * LANES * 2, ROWS)
        turned = _butterfly(turned, ROWS * LANES * 4, ROWS)
        if BACK:
            turned = tl.where(minus, -turned, turned)
    else:
        turned = tl.zeros((SLOTS, ROWS, LANES), tl.float32)
        all_columns = tl.broadcast_to(column, (SLOTS, ROWS, LANES))
        for place in range(SIZE):
            one = tl.sum(tl.sum(tl.where(column == place, values, 0.0), 0), 1)
            weights = tl.load(matrix + place * SIZE + all_columns, mask=valid, other=0.0)
            turned += one[None, :, None] * weights
    return turned


@triton.jit
def _minus(column):
    """Tell where the Rudin–Shapiro sequence is −1: where neighbouring ones in the binary digits are odd in number."""
    pairs = column & column >> 1
    pairs ^= pairs >> 4
    pairs ^= pairs >> 2
    pairs ^= pairs >> 1
    return (pairs & 1) == 1


@triton.jit
def _butterfly(values, DISTANCE: tl.constexpr, ROWS: tl.constexpr):
    """Return the sum of each value and its partner at a distance, or their difference in the partner's place."""
    pairs = tl.reshape(values, (SLOTS * ROWS * LANES // (2 * DISTANCE), 2, DISTANCE))
    bits = pairs.to(tl.int32, bitcast=True)
    # A sum of integers is exact, mod 2³²: without the own value it is the partner's. So each thread sends one value.
    partner = (tl.sum(bits, 1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
    second = tl.arange(0, 2)[None, :, None] == 1
    return tl.reshape(partner + tl.where(second, -pairs, pairs), (SLOTS, ROWS, LANES))


# ---- The dither: u in [0, 1) as a multiple of 2⁻²³.


@triton.jit
def row_words(row, line, slope, offset):
    """Return what a row adds to the dither, of which the lowest 23 bits count."""
    x = row.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    x ^= x >> 15
    if line is not None:
        slope = tl.load(line)
        offset = tl.load(line + 1)
    return (x.to(tl.int64) * slope + offset >> 41).to(tl.uint32)


@triton.jit
def dither(word, group, column):
    """Return u for each value: the sum of what its row and its column add, mod 2²³."""
    own = (column + group * GROUP).to(tl.uint32) * 0x9E3779B9 >> 9
    fraction = (word[None, :, None] + own) & 0x7FFFFF
    # These bits below those of 1.0 are 1 + u: faster than a conversion, and exact.
    return (fraction | 0x3F800000).to(tl.float32, bitcast=True) - 1.0

"""cost: what a layer keeps and computes, exactly or sketched (the paper's table of complexities)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import SketchConfig, check_config
from .kept import kept_bytes
from .sketches import Blocked, Sketch, make_sketch
from .sketches.base import CHUNK_ELEMENTS
from .sketches.hadamard import RADIX, Hadamard
from .sketches.hash import Hash
from .sketches.iid import LEAST_SLAB, IidSketch
from .sketches.orthonormal import OrthonormalSketch
from .sketches.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one step of one layer. A multiplication and an addition are one FLOP each.

    Attributes:
        kept: bytes held from forward to backward.
        transient: bytes of the largest helper tensor while sketching; nothing for the exact layer.
        forward: FLOPs of the product and of sketching the input.
        backward: FLOPs of ∂X, of sketching Y and of ∂W. Left out: ∂b, which is B·N_out additions either way, and what
            ``bits`` and ``center`` add, which is a few operations a kept value.
    """

    kept: int
    transient: int
    forward: int
    backward: int


def cost(config: SketchConfig | None, rows: int, in_features: int, out_features: int, itemsize: int = 4) -> Cost:
    """Return what one step of a linear layer costs under ``config``, or exactly with None (the paper's "No RMM").

    Args:
        rows: B, batch times sequence; in_features: N_in; out_features: N_out; itemsize: bytes a value of the input.
    """
    sizes = {"rows": rows, "in_features": in_features, "out_features": out_features, "itemsize": itemsize}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")
    product = 2 * rows * in_features * out_features
    if config is None:
        return Cost(kept=rows * in_features * itemsize, transient=0, forward=product, backward=2 * product)
    dim = check_config(config).dim_for(rows)
    sketch = make_sketch(config.kind, rows, dim, 0, config.block)
    weight_gradient = 2 * dim * in_features * out_features
    return Cost(
        kept=kept_bytes(config, rows, in_features, itemsize),
        transient=_helper_bytes(sketch, max(in_features, out_features)),
        forward=product + _flops(sketch, in_features),
        backward=product + _flops(sketch, out_features) + weight_gradient,
    )


def _flops(sketch: Sketch, features: int) -> int:
    """Return the FLOPs of SᵀX for an X with ``features`` columns, to leading order; drawing S is not counted."""
    signs = sketch.rows * features
    if isinstance(sketch, Blocked):
        return sum(2 * len(rows) * dim for rows, dim in sketch.members()) * features
    if isinstance(sketch, IidSketch):
        return 2 * sketch.rows * sketch.dim * features
    if isinstance(sketch, Hadamard):
        height = sketch.block_height(sketch.rows)
        return signs + 2 * height * features * sum(_radices(height))
    if isinstance(sketch, OrthonormalSketch):
        return signs + int(2.5 * sketch.rows * math.log2(max(sketch.rows, 2))) * features  # a real FFT
    return 2 * signs if isinstance(sketch, Hash) else 0


def _helper_bytes(sketch: Sketch, features: int) -> int:
    """Return the bytes of the largest tensor that sketching makes beside its result."""
    if isinstance(sketch, Blocked):
        blocks = max(1, min(sketch.count, CHUNK_ELEMENTS // max(1, sketch.dim // sketch.count * sketch.height)))
        return 4 * blocks * -(-sketch.dim // sketch.count) * sketch.height
    if isinstance(sketch, IidSketch):
        return 4 * sketch.dim * min(sketch.rows, max(LEAST_SLAB, CHUNK_ELEMENTS // sketch.dim))
    if isinstance(sketch, OrthonormalSketch):
        height = sketch.block_height(sketch.rows)
        return 4 * height * min(features, max(1, CHUNK_ELEMENTS // max(height, 1)))
    return 8 * sketch.rows if isinstance(sketch, Rows | Hash) else 0


def _radices(height: int) -> list[int]:
    """List the sizes of the small Hadamard matrices whose product is the large one."""
    radices = []
    while height > 1:
        radices.append(min(RADIX, height))
        height //= radices[-1]
    return radices

"""cost: what a layer keeps and computes, exactly or sketched (the paper's table of complexities)."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import SketchConfig, check_config
from ..linear.keeping import kept_bytes
from ..sketches import make_sketch


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one step of one layer. A multiplication and an addition are one FLOP each.

    Attributes:
        kept: bytes held from forward to backward.
        transient: bytes of the largest helper tensor while sketching; 0 for the exact layer.
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
        rows: B, batch times sequence; in_features: N_in; out_features: N_out; itemsize: bytes of one input value.
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
        transient=sketch.helper_bytes(max(in_features, out_features)),
        forward=product + sketch.flops(in_features),
        backward=product + sketch.flops(out_features) + weight_gradient,
    )

"""Count what one linear layer computes and keeps in a training step, operation by operation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from backsketch import SketchConfig, saved_memory, sketch_

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
_TRANSFORMS = ("_fft_r2c", "_fft_c2r", "_fft_c2c")


class MultiplyAdds(TorchDispatchMode):
    """Count the multiply-adds of matrix products, and of Fourier transforms at 1.25 n log2 n for n real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_")
        if name in _PRODUCTS:
            left, right = (args[place] for place in _PRODUCTS[name])
            self.total += left.numel() * right.shape[-1]
        elif name in _TRANSFORMS:
            self.total += _transform(args[0], out, args[1])
        return out


def count(config: SketchConfig | None, rows: int, inputs: int, outputs: int) -> dict[str, Any]:
    """Return the multiply-adds of forward and of backward, and the bytes kept in between."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(inputs, outputs))
    if config is not None:
        sketch_(layer, config)
    x, y = torch.randn(rows, inputs, requires_grad=True), torch.randn(rows, outputs)
    with saved_memory(layer) as saved, MultiplyAdds() as forward:
        out = layer(x)
    kept = saved.activations
    with MultiplyAdds() as backward:
        out.backward(y)
    return {
        "dim": rows if config is None else config.dim_for(rows),
        "forward_multiply_adds": forward.total,
        "backward_multiply_adds": backward.total,
        "kept_bytes": kept,
    }


def _transform(before: Tensor, after: Tensor, dims: list[int]) -> int:
    length = math.prod(max(before.shape[dim], after.shape[dim]) for dim in dims)
    numbers = max(tensor.numel() * (2 if tensor.is_complex() else 1) for tensor in (before, after))
    return round(1.25 * numbers * math.log2(length))

"""The inputs of a linear layer: which can be sketched, and their dtype under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_inputs(x: Tensor, weight: Tensor) -> None:
    """Raise for inputs that F.linear accepts and a sketch does not."""
    if weight.is_complex():
        raise TypeError(f"weight must be of a real floating-point type to be trained from a sketch, got {weight.dtype}")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"x must be a dense tensor to be sketched, got one of layout {x.layout}")
    if weight.dim() != 2 or x.dim() == 0:
        raise ValueError(
            "x must be (..., in_features) and weight (out_features, in_features), "
            f"got shapes {tuple(x.shape)} and {tuple(weight.shape)}"
        )


def autocast_to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast a tensor to ``dtype`` if autocast would: floating-point types except fp64. None casts nothing."""
    if dtype is None or tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the input of a linear layer from the arguments of its call."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x

"""The paper's method as published: Algorithm 1 with one dense Gaussian S (B × B_proj), drawn again in backward.

It is the baseline, and not part of the library: no blocks, no slabs, no sharing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PaperLinear(nn.Linear):
    """A linear layer that trains by the paper's Algorithm 1 at the given ratio."""

    ratio: float

    def forward(self, input: Tensor) -> Tensor:
        return _Algorithm1.apply(input, self.weight, self.bias, self.ratio)


def paper_(model: nn.Module, ratio: float) -> nn.Module:
    """Convert every nn.Linear of ``model`` in place."""
    for layer in _layers(model, nn.Linear):
        layer.__class__, layer.ratio = PaperLinear, ratio
    return model


def unpaper_(model: nn.Module) -> nn.Module:
    """Turn every layer that ``paper_`` converted back into nn.Linear, in place."""
    for layer in _layers(model, PaperLinear):
        layer.__class__ = nn.Linear
        del layer.ratio
    return model


def _layers(model: nn.Module, kind: type) -> list[Any]:
    return [module for module in model.modules() if type(module) is kind]


class _Algorithm1(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ratio: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.dim, ctx.seed = max(1, round(ratio * len(rows))), int(torch.randint(2**62, ()))
        ctx.save_for_backward(_dense(len(rows), ctx.dim, ctx.seed, x).t() @ rows, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        y = grad_out.reshape(-1, grad_out.shape[-1])
        projected = _dense(len(y), ctx.dim, ctx.seed, y).t() @ y
        return grad_out @ weight, projected.t() @ kept, y.sum(0), None


def _dense(rows: int, dim: int, seed: int, like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(rows, dim, generator=generator, device=like.device, dtype=like.dtype) / dim**0.5

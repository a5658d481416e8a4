"""A linear layer with deflation: the part of X in a rank-r subspace is kept exactly, only the rest is sketched.

With an orthonormal V (features × rank), XᵀY = V (XV)ᵀY + (X − XVVᵀ)ᵀY. The first term is exact from V and XV. The
second is estimated from a sketch of the rest, so its noise is that of the sketch with X − XVVᵀ in place of X, for any V
that is independent of S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backsketch import SketchConfig, noise
from backsketch.linear.keeping import kept_bytes, sketch_for
from backsketch.linear.weight_gradient import weight_gradient
from backsketch.storage.packing import write
from backsketch.storage.stored_rows import StoredRows

_BASIS_STREAM = 0x2545F491


@dataclass(frozen=True, slots=True)
class Deflation:
    """The rank of the exact part, how many power steps find its subspace, and how the rest is sketched."""

    rank: int
    power: int
    config: SketchConfig

    def kept_bytes(self, rows: int, features: int) -> int:
        """Return the bytes kept of an fp32 input: XV, V, and the sketch of the rest."""
        return 4 * self.rank * (rows + features) + kept_bytes(self.config, rows, features, 4)

    def variance(self, x: Tensor, y: Tensor, valid: Tensor, seed: int) -> Tensor:
        """Return D² given the basis that this seed draws: x (rows, in), y (rows, out), valid (rows,) -> ()."""
        if self.rank:
            basis = find_basis(x, self.rank, self.power, valid, seed)
            x = x - (x @ basis) @ basis.t()
        return noise.sketch_variance(x, y, self.config, valid)


def find_basis(x: Tensor, rank: int, power: int, valid: Tensor, seed: int) -> Tensor:
    """Return an orthonormal basis near the leading right singular vectors of the valid rows: (features, rank)."""
    generator = torch.Generator(device=x.device).manual_seed(seed ^ _BASIS_STREAM)
    mix = torch.randn(rank, len(x), generator=generator, device=x.device, dtype=x.dtype) * valid
    basis = torch.linalg.qr((mix @ x).t()).Q
    for _ in range(power):
        basis = torch.linalg.qr(x.t() @ ((x @ basis) * valid.unsqueeze(1))).Q
    return basis


class DeflatedLinear(nn.Linear):
    """A linear layer whose weight gradient is exact in a subspace of its input and sketched outside it."""

    deflation: Deflation
    valid: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return _Deflated.apply(input, self.weight, self.bias, self.deflation, self.valid)


class _Deflated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, deflation: Deflation, valid: Tensor) -> Tensor:
        seed = torch.randint(2**62, ())
        rows, config = x.reshape(-1, x.shape[-1]), deflation.config
        basis = find_basis(rows, deflation.rank, deflation.power, valid, int(seed))
        core = rows @ basis
        sketch = sketch_for(config, len(rows), seed, valid)
        rest = torch.addmm(sketch.compress(rows), sketch.compress(core), basis.t(), alpha=-1)
        kept: tuple[Tensor, ...] = (rest,)
        if config.bits is not None:
            stored = StoredRows.empty(rest, len(rest), rest.shape[1], config.bits, config.rotate, int(seed))
            write(stored, rest)
            kept = (stored.codes, stored.ranges)
        ctx.save_for_backward(weight, basis, core, valid, seed, *kept)
        ctx.config = config
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        weight, basis, core, valid, *kept = ctx.saved_tensors
        y = grad_out.reshape(-1, grad_out.shape[-1])
        gradient = weight_gradient(tuple(kept), y, ctx.config, weight.shape[1], valid)
        gradient.addmm_(y.t() @ core, basis.t())
        return grad_out @ weight, gradient, y.sum(0), None, None

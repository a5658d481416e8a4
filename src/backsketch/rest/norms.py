"""Norms: their inputs precise, since backward is quadratic in them; below 8 bits its bias is made up for.

Backward of a norm is r · (ĝ − mean ĝ − x̂ · mean(ĝ · x̂)), with ĝ the gradient times the weight and r the inverse of the
deviation. Rounding adds the variance v of its error to the square of each value: on average r³ · ĝ · v / n is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..autocasting import autocast_on
from ..storage.packed_tensor import PackedTensor
from ..storage.ranges import any_flag
from .first_derivatives import first_derivative_only
from .rules import PRECISE, Call, Rule, is_activation, is_broadcast
from .saving import Kept, SavingStep


@dataclass(frozen=True, slots=True)
class Norm(Rule):
    """Keep the input of a norm, with at least 8 bits where its bias is not subtracted.

    ``own`` is over how many of the last dimensions it runs, if each row is normed by itself.
    """

    own: int | None = None

    def __call__(self, call: Call) -> Any:
        x, bits = call.argument(0, "input"), call.step.config.norm
        precise = None if bits is None else max(bits, PRECISE)

        def keep(tensor: Tensor) -> Kept | None:
            if not is_activation(tensor) or is_broadcast(tensor, x.numel()):
                return None  # one number a row, of which a row of zeros has a huge one
            packed = call.step.few_bits(tensor, precise, centred=True)
            if self.own is None or not isinstance(packed, PackedTensor) or tensor.dim() < self.own:
                return packed
            return ZeroRows(packed, (_rows_of_zeros(tensor.detach(), tuple(range(-self.own, 0))),))

        return call.keeping("norm", keep)


@dataclass(frozen=True, slots=True, eq=False)
class ZeroRows:
    """A packed tensor whose rows of zeros come back exact, though values around them have a common range with them.

    A norm divides such a row by the root of eps, which may be a millionth: no rounding error is small beside that.
    """

    packed: PackedTensor
    flags: tuple[Tensor, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold it."""
        return (*self.packed.tensors, *self.flags)

    @property
    def offloaded(self) -> bool:
        """Tell whether hooks around the forward pass hold the packed tensor; the flags are small."""
        return self.packed.offloaded

    def unpack(self) -> Tensor:
        """Return the tensor, in dense memory."""
        values, zeros = self.packed.unpack(), self.flags[0]
        if not any_flag(zeros):
            return values
        return values.masked_fill(zeros, 0) if 0 in values.stride() else values.masked_fill_(zeros, 0)  # 0: expanded

    def held_by(self, tensors: tuple[Tensor, ...]) -> ZeroRows:
        """Return the same, held by other tensors of equal values, or by none for now."""
        return replace(self, packed=self.packed.held_by(tensors[:-1]), flags=tensors[-1:])


def _rows_of_zeros(x: Tensor, own: tuple[int, ...]) -> Tensor:
    """Tell which rows are zero throughout: (..., *own) -> (..., 1 for each of own)."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=own, keepdim=True)
    return norms == 0


@dataclass(frozen=True, slots=True)
class NormOverLast(Rule):
    """Keep the input of a norm over the last dimensions, with its bias subtracted below 8 bits.

    ``centers`` tells layer_norm, which subtracts the mean, from rms_norm.
    """

    centers: bool

    def __call__(self, call: Call) -> Any:
        x, bits = call.argument(0, "input"), call.step.config.norm
        shape = call.argument(1, "normalized_shape")
        precise = Norm(own=len(shape))
        if bits is None or bits >= PRECISE or not call.covers(x) or autocast_on(x.device.type):
            return precise(call)
        eps = call.argument(4, "eps", 1e-5) if self.centers else call.argument(3, "eps")
        if eps is None:
            if x.itemsize < 4:
                return precise(call)  # versions of torch differ in what they take for it in half precision
            eps = torch.finfo(x.dtype).eps
        weight = call.argument(2, "weight")
        bias = call.argument(3, "bias") if self.centers else None
        arguments = (x, weight, bias, call.as_it_is, len(shape), eps, self.centers, call.step)
        return call.replaced_by(_Corrected.apply, *arguments)


class _Corrected(torch.autograd.Function):
    """A norm over the last dimensions whose backward subtracts the bias that rounding its input adds."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        run: Callable[[], Tensor],
        dims: int,
        eps: float,
        centers: bool,
        step: SavingStep,
    ) -> Tensor:
        packed = step.own_copy("norm", x, step.config.norm)
        own = tuple(range(-dims, 0))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = None
        if centers:
            spread, mean = torch.var_mean(wide, own, correction=0, keepdim=True)
        else:
            spread = wide.square().mean(own, keepdim=True)
        inverse = (spread + eps).rsqrt_()
        ctx.own, ctx.packed, ctx.dtype = own, packed.held_by(()), x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(weight, mean, inverse, _rows_of_zeros(x, own), *packed.tensors)
        return run()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        weight, mean, inverse, zeros, *tensors = ctx.saved_tensors
        packed = ctx.packed.held_by(tuple(tensors))
        grad_out = grad_out.to(inverse.dtype)
        others = tuple(range(grad_out.dim() - len(ctx.own)))
        normed = packed.unpack().to(inverse.dtype)
        normed = (normed if mean is None else normed - mean).mul_(inverse).masked_fill_(zeros, 0)
        grad_weight = None if weight is None else (grad_out * normed).sum(others).to(weight.dtype)
        grad_bias = None if ctx.bias_dtype is None else grad_out.sum(others).to(ctx.bias_dtype)
        grad = grad_out if weight is None else grad_out * weight
        # What the square of the rounded input has too much, as a share: v · r² / n.
        excess = packed.variance().to(inverse.dtype) * inverse.square() / packed.shape[ctx.own[0] :].numel()
        grad_x = grad * (1 + excess.masked_fill_(zeros, 0)) - normed * (grad * normed).mean(ctx.own, keepdim=True)
        if mean is not None:
            grad_x -= grad.mean(ctx.own, keepdim=True)
        return (grad_x * inverse).to(ctx.dtype), grad_weight, grad_bias, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class Power(Rule):
    """Keep the input of a square or a higher power, as in norms that are written out.

    Such a norm multiplies the same input by the inverse root of its mean square. In 8 bits both share a copy. In fewer
    each has its own: their errors are then independent, and the gradient unbiased.
    """

    def __call__(self, call: Call) -> Any:
        exponent = call.argument(1, "exponent", 2)
        if not isinstance(exponent, (int, float)) or exponent < 2 or exponent != int(exponent):
            return call.as_it_is()
        return self.keeping(call, exponent)

    @staticmethod
    def keeping(call: Call, exponent: float) -> Any:
        """Run a call whose backward multiplies by a power of its input."""
        bits = call.step.config.norm
        if call.step.config.product is None:  # then the product with the same input holds it anyway
            return call.as_it_is()
        if bits is not None and exponent > 2:
            bits = max(bits, PRECISE)  # backward is not linear in it

        def keep(tensor: Tensor) -> Kept | None:
            if not is_activation(tensor):
                return None
            return call.step.few_bits(tensor, bits, centred=True, shared=bits is None or bits >= PRECISE)

        return call.keeping("norm", keep)

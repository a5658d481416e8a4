"""Elementwise products, and casts of them: few bits for the operands, none for a product that can be made again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..storage.packed_copies import remember_cast, remember_product
from .norms import Power
from .origins import is_weight
from .rules import PRECISE, Call, FewBits, Rule, is_broadcast
from .saving import is_plain


@dataclass(frozen=True, slots=True)
class Multiplied(Rule):
    """Keep the operands of an elementwise product. One that is multiplied by itself is squared, as by ``Power``.

    A norm that is written out multiplies its input x by one number a row, which gives x̂, and x̂ by a weight. Both
    products save what they multiply. Since the copy of x is precise, whoever saves x̂ makes it again from that.
    """

    def __call__(self, call: Call) -> Any:
        one, other = call.argument(0, "input"), call.argument(1, "other")
        if one is other:
            return Power.keeping(call, 2)
        product = FewBits("product", elementwise=True)(call)
        if is_plain(one) and is_plain(other) and is_plain(product):
            factor, x = (one, other) if one.numel() < other.numel() else (other, one)
            if is_broadcast(factor, x.numel()) and not is_weight(factor):
                remember_product(x, factor, product, PRECISE)
        return product


@dataclass(frozen=True, slots=True)
class Cast(Rule):
    """Cast a tensor, and let whoever saves the result make it again if the tensor itself can be made again."""

    def __call__(self, call: Call) -> Any:
        x, result = call.argument(0, "input"), call.as_it_is()
        if is_plain(x) and is_plain(result) and isinstance(result, Tensor) and result.dtype != x.dtype:
            remember_cast(x, result)
        return result

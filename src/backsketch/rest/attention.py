"""Attention: q and k precise, since backward goes through exp; v and the output in fewer bits, unbiased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .dropout import kept_mask
from .origins import is_weight, same_memory
from .rules import Call, Rule, is_activation, twice_on_a_path
from .saving import Kept, is_plain


@dataclass(frozen=True, slots=True)
class Attention(Rule):
    """Keep what scaled_dot_product_attention saves, whichever kernel runs.

    Fused kernels save q, k, v, the output and one number a row; the plain one also the probabilities and the mask of
    dropout. Backward is linear in v and in the output, given the probabilities.
    """

    def __call__(self, call: Call) -> Any:
        query, key, value = (call.argument(place, name) for place, name in enumerate(("query", "key", "value")))
        if not (is_plain(query) and is_plain(key) and is_plain(value)):
            return call.as_it_is()
        mask, p = call.argument(3, "attn_mask"), call.argument(4, "dropout_p", 0.0)
        out_shape = (*query.shape[:-1], value.shape[-1])
        step, config = call.step, call.step.config

        def contracted(tensor: Tensor, bits: int | None, *, shared: bool = True) -> Kept | None:
            """Keep what is contracted along its rows, most of which is often one vector that all tokens share."""
            return step.few_bits(tensor, bits, rotated=True, centred=True, shared=shared)

        def keep(tensor: Tensor) -> Kept | None:
            if is_weight(tensor) or _comes_from(tensor, mask):
                return None  # a mask that is given may hold numbers near minus infinity, beside which others vanish
            if same_memory(tensor, query) or same_memory(tensor, key):
                return contracted(tensor, config.attention)
            if same_memory(tensor, value):
                # The gradient of q and k is a product with v: what made them of v must not multiply by the same copy.
                return contracted(tensor, config.product, shared=not twice_on_a_path(tensor, config.product, call))
            if not tensor.requires_grad:
                return kept_mask(tensor, p, sure=False)
            if _fused_output(tensor):
                return contracted(tensor, config.product) if tuple(tensor.shape) == out_shape else None
            return step.few_bits(tensor, config.attention)

        return call.keeping("attention", keep)


def _comes_from(tensor: Tensor, mask: Tensor | None) -> bool:
    """Tell whether a tensor is the mask, or what a kernel made of it alone, such as a padded copy."""
    if mask is None or same_memory(tensor, mask):
        return mask is not None
    node: Any = tensor.grad_fn
    while node is not None and mask.grad_fn is not None:
        if node is mask.grad_fn:
            return True
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return False


def _fused_output(tensor: Tensor) -> bool:
    """Tell whether a fused kernel made the tensor; it also makes statistics, which stay as they are."""
    return tensor.grad_fn is not None and tensor.grad_fn.name().startswith("ScaledDotProduct")


@dataclass(frozen=True, slots=True)
class MultiHeadAttention(Rule):
    """Keep what torch's own multi-head attention saves, whose steps cannot be told apart, as precisely as q and k."""

    def __call__(self, call: Call) -> Any:
        p = call.argument(10, "dropout_p", 0.0)

        def keep(tensor: Tensor) -> Kept | None:
            if not tensor.requires_grad:
                floats = tensor.is_floating_point()  # flags may be a mask that is given, which many layers share
                return kept_mask(tensor, p, sure=False) if floats else None
            return call.step.few_bits(tensor, call.step.config.attention) if is_activation(tensor) else None

        return call.keeping("attention", keep)

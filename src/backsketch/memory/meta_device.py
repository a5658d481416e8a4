"""meta_step: run a training step on the meta device as an accelerator would run it on a batch without padding.

PyTorch has no fused kernels for meta tensors. Its fallbacks keep more for backward: attention keeps its probabilities,
and dropout keeps a mask in the dtype of its input. Fused attention keeps q, k, v, its output and one number a row, and
fused dropout keeps one byte a value. Meta tensors also have no values, so a model that asks whether a mask is all ones
gets no answer. Here it gets the answer for a batch without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..torch_private import (
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    GROUPED_PRODUCTS,
    backward_under_modes,
    with_globals,
)


class meta_step(TorchFunctionMode):  # noqa: N801 (a context manager, used as a verb)
    """Inside the block, use fused kernels for meta tensors, and answer questions about their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and len(args) == 1 and not any(kwargs.values()):
            with self:  # a checkpoint runs its region again in backward, by the same kernels
                return backward_under_modes(args[0])
        first = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(first, Tensor) and first.is_meta:
            if func in _ANSWERS and len(args) == 1 and not kwargs:
                return torch.tensor(_ANSWERS[func])
            if func is Tensor.__contains__:  # asks whether any token is padding
                return False
            if func is Tensor.__bool__:  # asks whether a mask is all ones
                return True
            func = _FUSED.get(func, func)
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    out: Tensor
    if query.dim() != 4:  # no fused kernel takes it
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # kernels add it, so each call makes a bias of it
        attn_mask = torch.where(attn_mask, 0.0, query.new_full((), -torch.inf))
    learned = attn_mask is not None and attn_mask.requires_grad
    if learned or query.shape[-1] != value.shape[-1]:  # only this kernel can
        out = EFFICIENT_ATTENTION(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    else:
        out = FLASH_ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


# It is Python, inside of which no mode is asked. This is the same code with fused kernels in it.
_multi_head_attention = with_globals(
    F.multi_head_attention_forward,
    has_torch_function=lambda _: False,  # it would ask the mode again, and not go on
    scaled_dot_product_attention=_attention,
    dropout=_dropout,
)


class _GroupedProduct(torch.autograd.Function):
    """The product of rows with the weights of experts, of which the kernel for meta tensors knows bf16 alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, offs: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weights, offs)
        return rows.new_empty(len(rows), weights.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            torch.empty_like(saved) if needed else None
            for saved, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        )


def _grouped_product(rows: Tensor, weights: Tensor, **options: Any) -> Tensor:
    if rows.dtype == torch.bfloat16 or rows.dim() != 2 or weights.dim() != 3:
        return GROUPED_PRODUCTS[0](rows, weights, **options)
    out: Tensor = _GroupedProduct.apply(rows, weights, options.get("offs"))  # type: ignore[no-untyped-call]
    return out


_FUSED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.multi_head_attention_forward: _multi_head_attention,
}
_FUSED |= dict.fromkeys(GROUPED_PRODUCTS, _grouped_product)
_ANSWERS: dict[Any, bool] = {Tensor.all: True, torch.all: True, Tensor.any: False, torch.any: False}

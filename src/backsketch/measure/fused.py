"""fused_kernels: on the meta device, attention and dropout as an accelerator runs them.

PyTorch has no fused kernels for meta and falls back to steps that keep more: the attention probabilities, and dropout
masks in the input's type. Fused attention keeps q, k, v, its output and one number a row, fused dropout a byte a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class fused_kernels(TorchFunctionMode):  # noqa: N801 (a context manager, used as a verb)
    """Take fused kernels for meta tensors while inside."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fused = _FUSED.get(func, func)
        return (fused if args and _is_meta(args[0]) else func)(*args, **(kwargs or {}))


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
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return out


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


_FUSED: dict[Any, Callable[..., Tensor]] = {F.scaled_dot_product_attention: _attention, F.dropout: _dropout}

"""check_products: refuse a model that multiplies tensors of two types, as the meta device alone does."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..memory.meta_device import meta_step
from ..memory.training_step import Loss, forward_to_loss
from ..torch_private import EFFICIENT_ATTENTION, FLASH_ATTENTION, TorchDispatchMode, tree_leaves, tree_map_only
from .batches import Inputs


def check_products(model: nn.Module, inputs: Inputs, loss: Loss | None) -> None:
    """Raise ValueError that names the types of a model and a batch if a product in a step is of two of them."""
    tensors = [*model.parameters(), *(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))]
    if len({tensor.dtype for tensor in tensors if tensor.is_floating_point()}) < 2:
        return
    try:
        with _OneType():  # type: ignore[no-untyped-call]
            _run(model, inputs, loss)
    except _TwoTypesError as error:
        got = f"{error}"
    except RuntimeError:
        if not _runs_in_one_type(model, inputs, loss):
            return  # the step that is measured next fails too, and says so
        got = "an operation that takes no two types"
    else:
        return
    names: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(_short(parameter.dtype), []).append(name)
    types = "; ".join(f"{dtype} in {own[0]} and {len(own) - 1} more" for dtype, own in names.items())
    raise ValueError(f"model must multiply tensors of one type or cast them, got {got}: its parameters are {types}")


def _run(model: nn.Module, inputs: Inputs, loss: Loss | None) -> None:
    args, kwargs = inputs
    with meta_step():
        forward_to_loss(model, args, kwargs, loss)


def _runs_in_one_type(model: nn.Module, inputs: Inputs, loss: Loss | None) -> bool:
    """Tell whether a copy runs whose floats, and those of the batch, are all of one type."""
    inputs = tree_map_only(Tensor, lambda each: each.float() if each.is_floating_point() else each, inputs)
    try:
        _run(copy.deepcopy(model).float(), inputs, loss)
    except RuntimeError:
        return False
    return True


class _TwoTypesError(Exception):
    """A product of two types."""


class _OneType(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside the block, raise an error for a product of two types."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _PRODUCTS:
            kinds = list(dict.fromkeys(value.dtype for value in args[:3] if isinstance(value, Tensor)))
            if len(kinds) > 1:
                raise _TwoTypesError(" × ".join(map(_short, kinds)))
        return func(*args, **(kwargs or {}))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_aten = torch.ops.aten
_PRODUCTS = {  # of their first arguments: two factors and what is added, or queries, keys and values
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot, _aten.convolution,
    FLASH_ATTENTION, EFFICIENT_ATTENTION,
}  # fmt: skip

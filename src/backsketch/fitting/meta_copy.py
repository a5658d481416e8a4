"""meta_copy: a copy of a model on the meta device, which has shapes and no values, so that it costs no memory."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..torch_private import is_traceable_wrapper_subclass

Model = TypeVar("Model", bound=nn.Module)


def meta_copy(model: Model) -> Model:
    """Return ``model`` in train(), with every tensor on the meta device; tied weights stay tied."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            kind = type(parameter).__name__
            raise ValueError(f"model must have plain parameters, not sharded yet and not quantised, got {name}: {kind}")
    for module in model.modules():
        for value in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = _twin(value)
    found = copy.deepcopy(model, memo)
    return found if found.training else found.train()


def _twin(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(_shape(tensor), requires_grad=tensor.requires_grad)
    return _shape(tensor).requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _shape(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

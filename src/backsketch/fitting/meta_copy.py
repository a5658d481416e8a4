"""meta_copy: a copy of a model on the meta device, which has shapes and no values, so that it costs no memory."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..sharded import own_class

Model = TypeVar("Model", bound=nn.Module)


def meta_copy(model: Model) -> Model:
    """Return ``model`` in train(), with every tensor on the meta device; tied weights stay tied."""
    memo: dict[int, Any] = {}
    for name, module in model.named_modules():
        if own_class(module) is not type(module):
            raise ValueError(f"model must not be sharded yet, as fit shards it on paper: {name or 'the model'} is")
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

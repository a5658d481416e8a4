"""Batches of other sizes than the one that is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..torch_private import tree_leaves, tree_map_only

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
BatchMaker: TypeAlias = Callable[[int, int | None], Inputs]  # batch, length -> arguments of the model


@dataclass(frozen=True, slots=True)
class ResizableBatch:
    """A batch on the meta device that can be made in other sizes.

    The first dimension of its tensors is the batch. The length is the second dimension of a tensor of whole numbers
    (batch, length), or of floats (batch, length, features); every tensor of whole numbers that has it is resized with
    it, and so are masks (batch, heads, length, length). Images have no length.
    """

    inputs: Inputs
    batch: int
    length: int | None

    @classmethod
    def of(cls, inputs: Inputs) -> ResizableBatch:
        on_meta: Inputs = tree_map_only(Tensor, lambda tensor: _meta(tensor, tuple(tensor.shape)), inputs)
        tensors = [leaf for leaf in tree_leaves(on_meta) if isinstance(leaf, Tensor) and leaf.dim()]
        if not tensors:
            raise ValueError("the batch must hold a tensor with a dimension for examples, got none")
        if not tensors[0].shape[0]:
            raise ValueError(f"the batch must hold at least one example, got none in {tuple(tensors[0].shape)}")
        lengths = [tensor.shape[1] for tensor in tensors if tensor.dim() == (3 if tensor.is_floating_point() else 2)]
        return cls(on_meta, tensors[0].shape[0], lengths[0] if lengths else None)

    def sized(self, batch: int, length: int | None) -> Inputs:
        """Return the arguments of a model for so many examples of such a length."""
        resized: Inputs = tree_map_only(
            Tensor, lambda tensor: _meta(tensor, self._shape(tensor, batch, length)), self.inputs
        )
        return resized

    def _shape(self, tensor: Tensor, batch: int, length: int | None) -> tuple[int, ...]:
        shape = list(tensor.shape)
        if shape and shape[0] == self.batch:
            shape[0] = batch
        if length is None or self.length is None:
            return tuple(shape)
        mask = tensor.dim() == 4 and shape[2:] == [self.length, self.length]
        whole = not tensor.is_floating_point() and tensor.dim() > 1
        for place in (2, 3) if mask else (1,) if whole or tensor.dim() == 3 else ():
            if shape[place] == self.length:
                shape[place] = length
        return tuple(shape)


def _meta(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    own = tensor.requires_grad and tensor.is_leaf
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=own)

"""Run a model forward to a scalar loss, whatever it takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..autocasting import without_autocast
from ..tensor_storages import model_tensors
from ..torch_private import tree_leaves, tree_map_only

Loss: TypeAlias = Callable[[Any], Tensor]


def forward_to_loss(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None) -> Tensor:
    """Run ``model`` and return its loss: ``loss(output)``, else ``output.loss``, else the mean of its first output."""
    if not torch.is_grad_enabled():
        raise ValueError("measuring a training step needs gradients: do not call this inside no_grad or inference_mode")
    output = model(*args, **kwargs)
    value = default_loss(output) if loss is None else loss(output)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise ValueError(f"loss must return a scalar tensor that requires grad, got {value!r}")
    return value


def backward(loss: Tensor) -> None:
    """Run backward outside of autocast, as trainers do, also where forward ran inside."""
    with without_autocast(loss.device.type):
        loss.backward()  # type: ignore[no-untyped-call]


def default_loss(output: Any) -> Tensor:
    """Return ``output.loss``, or the mean of the first float tensor of the output that has a gradient."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is not None:
        value: Tensor = found
        return value
    for tensor in _tensors(output):
        if tensor.is_floating_point() and tensor.requires_grad:
            return tensor.mean()
    raise ValueError("the model returns no loss and no float tensor that requires grad: give loss=")


def on_meta(model: nn.Module) -> bool:
    """Tell whether the model is on the meta device, where tensors have shapes and no values."""
    return any(tensor.is_meta for tensor in model_tensors(model))


def to_device_of(model: nn.Module, inputs: Any) -> Any:
    """Return ``inputs`` with all tensors on the meta device if the model is there, else as they are."""
    return tree_map_only(torch.Tensor, _shape_of, inputs) if on_meta(model) else inputs


def _shape_of(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)  # a leaf: no gradient goes back from meta


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Mapping):
        output = list(output.values())
    elif is_dataclass(output):
        output = [getattr(output, each.name) for each in fields(output)]
    return (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

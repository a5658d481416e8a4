"""untouched: measure a model on a training step and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..conversion import sketched_type


@contextmanager
def untouched(model: nn.Module, inputs: Any = ()) -> Iterator[None]:
    """Put ``model`` into training without gradients, and at the end give back all that a step may change.

    That is: the class of every layer, training flags, buffers, ``.grad`` of parameters and of tensors in ``inputs``
    (the very same tensors), and the state of every random generator.
    """
    layers = [(module, module.__class__, dict(module.__dict__)) for module in model.modules() if sketched_type(module)]
    flags = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    leaves = [*model.parameters(), *(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_leaf)]
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    with _same_randomness():
        try:
            for leaf in leaves:
                leaf.grad = None
            if not model.training:
                model.train()
            yield
        finally:
            for layer, kind, attributes in layers:
                layer.__class__ = kind
                layer.__dict__.clear()
                layer.__dict__.update(attributes)
            for module, flag in flags:
                module.training = flag
            for leaf, gradient in gradients:
                leaf.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


@contextmanager
def _same_randomness() -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield

"""untouched: run training steps of a model and leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..sharded import reshard
from ..torch_private import tree_leaves


@contextmanager
def untouched(model: nn.Module, inputs: Any = ()) -> Iterator[None]:
    """Put ``model`` into training mode, without gradients, and at the end restore all that a step may change.

    That is: the class, attributes and hooks of every module, training flags, buffers, ``.grad`` of parameters and of
    tensors in ``inputs`` (the very same tensors), and the state of torch's random generators.
    """
    reshard(model)  # so that the snapshot holds no gathered parameters
    modules = [_Snapshot.of(module) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    leaves = [*model.parameters(), *(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_leaf)]
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    with same_randomness():
        try:
            for leaf in leaves:
                leaf.grad = None
            if not model.training:
                model.train()
            yield
        finally:
            reshard(model)
            for snapshot in modules:
                snapshot.restore()
            for leaf, gradient in gradients:
                leaf.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A module's class, its attributes, and the contents of those that are dicts: hooks, buffers, children."""

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]
    contents: dict[str, dict[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> _Snapshot:
        contents = {name: dict(value) for name, value in module.__dict__.items() if isinstance(value, dict)}
        return cls(module, module.__class__, dict(module.__dict__), contents)

    def restore(self) -> None:
        self.module.__class__ = self.kind
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for name, content in self.contents.items():
            value = self.module.__dict__[name]  # the same object: handles of hooks refer to it
            value.clear()
            value.update(content)


@contextmanager
def same_randomness() -> Iterator[None]:
    """Restore the state of torch's random generators at the end."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield

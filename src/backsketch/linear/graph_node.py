"""The node that a sketched layer leaves in the autograd graph: how to find it, and how to read its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..torch_private import is_node_of
from .algorithm import _SketchedLinear


def sketch_node(output: Tensor) -> Any | None:
    """Return the graph node of Algorithm 1 behind a layer's output; None if the layer ran as a plain one."""
    node = output.grad_fn
    return node if is_node_of(node, _SketchedLinear) else None


def kept_by(node: Any) -> tuple[Tensor, ...] | None:
    """Return what the layer keeps of its input; None if hooks, as those of checkpointing, keep something else."""
    kept = tuple(reference() for reference in getattr(node, "kept", ()))
    return kept if kept and all(tensor is not None for tensor in kept) else None


def after_backward(node: Any, run: Callable[[Tensor, Tensor], None]) -> None:
    """Call ``run(grad_weight, grad_out)`` after every backward through the node."""

    def hook(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> None:
        grad_weight, grad_out = grad_inputs[1], grad_outputs[0]  # the weight is input 1 of the Function
        if grad_weight is not None and grad_out is not None:
            run(grad_weight, grad_out)

    node.register_hook(hook)

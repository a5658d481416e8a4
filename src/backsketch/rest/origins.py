"""Where a saved tensor comes from: whose cast or view it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..torch_private import VIEWS_AND_CASTS, base_of, memory_id

_TAKES_ROWS = ("IndexBackward0", "IndexSelectBackward0")
_NODES_TO_SEE = 100  # a block of a transformer has fewer between two products of one tensor


def origin(tensor: Tensor) -> object:
    """Return the node that made a tensor, or the leaf it is, beneath all views and casts."""
    node: Any = tensor.grad_fn
    if node is None:
        return base_of(tensor)
    while node.name() in VIEWS_AND_CASTS and len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return getattr(node, "variable", node)  # of a leaf


def is_weight(tensor: Tensor) -> bool:
    """Tell whether a tensor is a parameter, or a view or a cast of one, as autocast makes them."""
    return isinstance(origin(tensor), nn.Parameter)


def is_of_experts(tensor: Tensor) -> bool:
    """Tell whether a tensor is a part of a parameter of three dimensions, which holds the weights of several experts.

    An expert's weight is a view of it, and the weights of many tokens are rows taken from it.
    """
    source: Any = origin(tensor)
    if not isinstance(source, Tensor) and getattr(source, "name", str)() in _TAKES_ROWS:
        source = getattr(source.next_functions[0][0], "variable", None)
    return isinstance(source, nn.Parameter) and source.dim() == 3


def may_depend_on(tensors: Iterable[Tensor], tensor: Tensor) -> bool:
    """Tell whether some tensors were computed from another one; True too if that takes long to find out."""
    sources = (origin(tensor), origin(base_of(tensor)))  # the latter beneath views of a kind that is not listed
    waiting: list[Any] = [each.grad_fn for each in tensors if each.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        made = getattr(node, "variable", node)
        if any(made is source for source in sources) or len(seen) == _NODES_TO_SEE:
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions if before is not None]
    return False


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same values in the same memory, whatever their shapes."""
    return (
        memory_id(one) == memory_id(other)
        and one.storage_offset() == other.storage_offset()
        and one.numel() == other.numel()
    )

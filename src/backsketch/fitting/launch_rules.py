"""The rules by which operators are counted: which ones launch a kernel, what it moves, and what it multiplies.

Unless a rule says otherwise, an operator reads all of its inputs and writes all of its outputs, each once. A tensor
counts the bytes it really has: an expanded dimension counts once, and an input that is given twice too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from ..storage.sizes import stored_bytes
from ..tensor_storages import tensors_of
from ..torch_private import memory_id


class Call(NamedTuple):
    """One call of an operator: its name without the namespace, its arguments and what it returned."""

    name: str
    arguments: Sequence[Any]
    keywords: dict[str, Any]
    result: Any


# Beside views: these only make or describe a tensor, or hand it on.
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
    "lift_fresh", "resize_", "set_", "is_same_size", "_local_scalar_dense",
}  # fmt: skip
# Their inputs give a shape or a place to write to, and are not read.
WRITE_ONLY = {
    "arange", "full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones",
    "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "rand", "randn", "randint", "rand_like",
    "randn_like",
}  # fmt: skip


def size(tensor: Tensor) -> int:
    """Return the bytes that a tensor really has: a dimension without a stride counts once."""
    lengths = (length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return (prod(lengths) if tensor.numel() else 0) * tensor.element_size()


def moved(call: Call) -> int:
    """Return the bytes that a call reads and writes."""
    rule = MOVED.get(call.name)
    return _everything(call) if rule is None else rule(call)


def multiplied(call: Call) -> int:
    """Return the floating-point operations of a call's matrix products; those of other operators never count."""
    rule = MULTIPLIED.get(call.name.removesuffix("_"))
    return 0 if rule is None else rule(call)


def _everything(call: Call) -> int:
    if call.name in WRITE_ONLY:
        return _written(call)
    given = [value for name, value in call.keywords.items() if name != "out"]
    return _distinct((call.arguments, given)) + _written(call)


def _written(call: Call) -> int:
    return _distinct(call.result)


def _distinct(values: Any) -> int:
    tensors = {_place(tensor): tensor for tensor in tensors_of(values)}
    return sum(map(size, tensors.values()))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return memory_id(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def _copied(call: Call) -> int:
    """copy_: reads the source and writes the target, which it does not read."""
    return size(call.arguments[1]) + size(call.arguments[0])


def _picked(call: Call) -> int:
    """index_select, gather, index, embedding: read the indices and the values they name, and write these."""
    indices = _distinct(call.arguments[1:])
    return indices + 2 * size(call.result)


def _scattered(call: Call) -> int:
    """scatter_, index_copy_, index_put_: read indices and source and write as many values as the source has."""
    *_, indices, source = call.arguments[:4]
    places = _distinct(indices)
    if isinstance(source, Tensor):
        return places + 2 * size(source)
    count = max((index.numel() for index in tensors_of(indices)), default=0)
    return places + count * int(call.arguments[0].element_size())


def _added(call: Call) -> int:
    """index_add_, scatter_add_: also read what they add to."""
    return _scattered(call) + size(call.arguments[3])


def _embedding_gradient(call: Call) -> int:
    """embedding_dense_backward: writes zeros first, then adds each row to its place."""
    return _everything(call) + 2 * size(call.arguments[0])


def _product(call: Call) -> int:
    """addmm, baddbmm, addmv, addr: with beta=0 what is added to is not read."""
    start = 1 if call.keywords.get("beta", 1) == 0 else 0
    return _distinct(call.arguments[start:]) + _written(call)


def _packed(call: Call) -> int:
    """pack_rows: reads the chosen rows of x once, and writes codes and ranges."""
    x, chosen, mean, *_ = call.arguments
    rows = len(x) if chosen is None else len(chosen)
    written = stored_bytes(rows, x.shape[1], call.arguments[9], x.element_size())
    return int(rows * x.shape[1] * x.element_size()) + _distinct([chosen, mean]) + written


def _unpacked(call: Call) -> int:
    """unpack_rows: reads the codes and ranges of the rows named, each once, and writes the rows."""
    codes, ranges, places, _, count = call.arguments[:5]
    named = min(len(codes), count)
    stored = named * (codes.shape[1] * codes.element_size() + ranges.shape[1:].numel() * ranges.element_size())
    return int(stored) + (0 if places is None else count * places.element_size()) + size(call.result)


def _gemm(left: int, right: int) -> Callable[[Call], int]:
    """Count 2 · rows · inner · columns of the product of two arguments, for each of a batch."""
    return lambda call: 2 * call.arguments[left].numel() * call.arguments[right].shape[-1]


def _attention(query: int, causal: int, products: int) -> Callable[[Call], int]:
    """Count products of length × length × width for each head, given the places of arguments; half if causal."""

    def count(call: Call) -> int:
        flops = 2 * products * call.arguments[query].numel() * call.arguments[query + 1].shape[-2]
        return int(flops) // 2 if len(call.arguments) > causal and call.arguments[causal] else int(flops)

    return count


MOVED: dict[str, Callable[[Call], int]] = {
    "copy_": _copied,
    **dict.fromkeys(("index_select", "gather", "index", "embedding"), _picked),
    **dict.fromkeys(("scatter_", "index_copy_"), _scattered),
    **dict.fromkeys(("index_add_", "scatter_add_"), _added),
    "embedding_dense_backward": _embedding_gradient,
    **dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_", "addmv", "addmv_", "addr", "addr_"), _product),
    "pack_rows": _packed,
    "unpack_rows": _unpacked,
}
MULTIPLIED: dict[str, Callable[[Call], int]] = {
    "mm": _gemm(0, 1),
    "bmm": _gemm(0, 1),
    "addmm": _gemm(1, 2),
    "baddbmm": _gemm(1, 2),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(query=0, causal=4, products=2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(query=1, causal=7, products=5),
}

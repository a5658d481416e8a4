"""LaunchCounter: count the kernels that a block of code launches on an accelerator, and the bytes they move.

It works on the meta device, which has shapes and no values, so it needs neither an accelerator nor memory. Counted is
one launch for each operator of torch that runs on the device. Not counted are views, operators that only make or
describe a tensor, operators without a value to compute, and operators on CPU tensors, such as those that draw a seed.
A call of a library counts once, though topk, sort, sums and products may launch more than one kernel inside; so do
pack_rows and unpack_rows, which launch twice for some odd sizes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensor_storages import tensors_of
from ..torch_private import TorchDispatchMode
from .launch_rules import FREE, Call, moved, multiplied


class Kernel(NamedTuple):
    """One launch: its operator, the bytes it reads and writes, and the flops of its matrix product in this type."""

    name: str
    bytes: int
    flops: int
    dtype: torch.dtype


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside the block, write down every kernel that is launched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(func, args, kwargs or {}, result)
        return result

    def count(self, operator: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Write down the kernel that an operator launches, if it does."""
        call = Call(str(operator).split(".")[1], args, kwargs, result)
        if not operator.is_view and call.name not in FREE and (tensors := _on_device(call)):
            self.kernels.append(Kernel(call.name, moved(call), multiplied(call), tensors[0].dtype))

    @property
    def launches(self) -> int:
        """Return how many kernels were launched."""
        return len(self.kernels)

    @property
    def bytes(self) -> int:
        """Return the bytes that all kernels moved."""
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def flops(self) -> int:
        """Return the floating-point operations of all matrix products."""
        return sum(kernel.flops for kernel in self.kernels)

    def by_operator(self) -> dict[str, int]:
        """Return operator -> launches, the most frequent first."""
        return dict(Counter(kernel.name for kernel in self.kernels).most_common())


def _on_device(call: Call) -> list[Tensor]:
    """List the tensors of a call that are not on the CPU, or none if it computes no value there."""
    made = tensors_of(call.result)
    tensors = [*tensors_of((call.arguments, call.keywords)), *made]
    computes = any(tensor.device.type != "cpu" and tensor.numel() for tensor in made or tensors)
    return [tensor for tensor in tensors if tensor.device.type != "cpu"] if computes else []

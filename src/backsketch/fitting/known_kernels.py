"""run_known: run operators on the meta device from memory.

Most kernels for meta tensors are Python: what one product of two tensors takes is a quarter of a millisecond. What they
return, shapes, strides and types, depends on those of their inputs alone. Blocks that are alike, and the parts of a
loss, ask for the same over and over.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Made: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def run_known(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator once for each kind of inputs, and then return empty tensors of the kind that it returned."""
    if operator not in _ALSO and torch.Tag.pointwise not in operator.tags:
        return operator(*args, **kwargs)
    try:
        key = (operator, _kind(args), _kind(tuple(kwargs.items())))
    except _UnknownError:
        return operator(*args, **kwargs)
    if key not in _KNOWN:
        out = operator(*args, **kwargs)
        if len(_KNOWN) < _MOST and (plan := _plan(out, args)) is not None:
            _KNOWN[key] = plan
        return out
    plan = _KNOWN[key]
    if plan is _FIRST:
        return args[0]
    made = tuple(torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in plan)
    return made if operator in _ALSO and len(made) > 1 else made[0]


class _UnknownError(Exception):
    """An argument that is neither a plain tensor on the meta device nor a plain value."""


def _kind(value: Any) -> Any:
    """Return what an argument tells a kernel of a meta tensor."""
    if type(value) in _TENSORS:
        if value.is_meta and value.layout is torch.strided:
            return tuple(value.shape), value.stride(), value.dtype
    elif type(value) in (tuple, list):
        return tuple(map(_kind, value))
    elif isinstance(value, _PLAIN):
        return type(value), value
    raise _UnknownError


def _plan(out: Any, args: Any) -> tuple[Made, ...] | None:
    """Return the kinds of the tensors that an operator made, or None if they are no fresh tensors without gaps."""
    if args and out is args[0]:
        return _FIRST
    outs = out if isinstance(out, tuple) else (out,)
    if not all(type(each) is Tensor and each.is_meta and each.storage_offset() == 0 for each in outs):
        return None
    plan = tuple((tuple(each.shape), each.stride(), each.dtype) for each in outs)
    fresh = (torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in plan)
    same = all(
        one.untyped_storage().nbytes() == two.untyped_storage().nbytes() for one, two in zip(outs, fresh, strict=True)
    )
    return plan if same else None


_FIRST: tuple[Made, ...] = ()  # an operator in place, which returns its first argument
_TENSORS = (Tensor, nn.Parameter)
_PLAIN = (int, float, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)
_MOST = 100_000  # kinds of inputs, of a few hundred bytes each
_KNOWN: dict[Any, tuple[Made, ...]] = {}
_aten = torch.ops.aten
_ALSO = {
    _aten.addmm_.default,
    _aten.amax.default,
    _aten.mean.dim,
    _aten.nll_loss_forward.default,
    _aten.sum.dim_IntList,
    _aten.cat.default,
}

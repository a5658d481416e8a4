"""The mask of a call that checkpointing makes again in backward, when no mask is in force any more."""

from __future__ import annotations

import weakref
from typing import TypeAlias

import torch
from torch import Tensor

from ..torch_private import in_backward
from .scopes import masked_rows

_Call: TypeAlias = tuple[int, torch.Size, torch.device]  # the seed that a call drew, and of its input the leading shape

_by_call: weakref.WeakValueDictionary[_Call, Tensor] = weakref.WeakValueDictionary()
_replaced: weakref.WeakValueDictionary[_Call, Tensor] = weakref.WeakValueDictionary()


def valid_for(x: Tensor, seed: Tensor) -> Tensor | None:
    """Return which rows of x count in the call that drew this seed, or None if all do.

    Checkpointing calls a layer again in backward, after the mask was lifted; it draws the same seed again, which tells
    what mask the first call had. A seed on a device is part of a captured graph and cannot be read.
    """
    if not seed.is_cpu:
        return masked_rows(x)
    call = (int(seed), x.shape[:-1], x.device)  # read in both passes: selective checkpointing compares their operations
    if in_backward():
        return _recalled(call)
    valid = masked_rows(x)
    if valid is not None:
        if (other := _by_call.get(call, valid)) is not valid and not _equal(other, valid):
            _replaced[call] = other
        _by_call[call] = valid
    return valid


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.is_meta or torch.equal(one, other)  # meta has no values


def _recalled(call: _Call) -> Tensor | None:
    if call in _replaced:
        raise RuntimeError(
            "two forward passes drew the same random numbers under different masks, so checkpointing cannot tell "
            "which mask to use again: do not reset the random seed between them"
        )
    return _by_call.get(call)

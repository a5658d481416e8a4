"""Fake tensors: shapes without values, of which nothing can be read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_exporting() -> bool:
    """Tell whether torch.export is tracing; torch 2.6 does not tell, and takes the layer for compiled."""
    return bool(getattr(torch.compiler, "is_exporting", lambda: False)())


def is_fake(tensor: Tensor) -> bool:
    """Tell whether a tensor has a shape, a dtype and a device, but no values, as inside FakeTensorMode."""
    return isinstance(tensor, FakeTensor)

"""Helpers of all numerical code: dtypes for long sums, flattening to rows, slabs small enough for a cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18  # 1 MiB of fp32: the largest helper matrix or slab that is made at once


def as_rows(x: Tensor) -> Tensor:
    """Flatten all leading dimensions: (..., features) -> (rows, features)."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which transforms and long sums run: at least fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widest(x: Tensor) -> Tensor:
    """Return x in fp64, or in fp32 on MPS, which has no fp64."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def row_slabs(rows: int, features: int) -> Iterator[slice]:
    """Split the rows so that one slab stays near CHUNK_ELEMENTS."""
    height = max(1, CHUNK_ELEMENTS // max(features, 1))
    return (slice(start, min(start + height, rows)) for start in range(0, rows, height))


def column_slabs(rows: int, features: int) -> Iterator[slice]:
    """Split the features so that one slab of all rows stays near CHUNK_ELEMENTS."""
    width = max(1, CHUNK_ELEMENTS // max(rows, 1))
    return (slice(start, min(start + width, features)) for start in range(0, features, width))

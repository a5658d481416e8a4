"""The fused form on a CPU: rows to codes and back in one pass, compiled once."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..cpu_library import library, threads_for
from ..torch_private import has_plain_memory
from .groups import GROUP
from .rotation import transform_matrix
from .stored_rows import StoredRows

_LEAST_VALUES = 1 << 15  # kept: for fewer, a process would take longer to load the kernel than it saves
_DTYPES = (torch.float32, torch.bfloat16)


def serves(stored: StoredRows, x: Tensor | None, dtype: torch.dtype) -> bool:
    """Tell whether the kernel can pack x, or read rows in this type. It never depends on values."""
    return (
        stored.codes.is_cpu
        and dtype in _DTYPES
        and has_plain_memory(stored.codes)
        and (x is None or (x.stride(1) == 1 and has_plain_memory(x)))
        and isinstance(stored.seed, int)
        and serves_for(stored.rows * stored.features)
    )


def serves_for(values: int) -> bool:
    """Tell whether there are compiled kernels, and enough values to call them."""
    return values >= _LEAST_VALUES and library() is not None


def write(stored: StoredRows, x: Tensor, chosen: Tensor | None, mean: Tensor | None, first_column: int) -> None:
    """Do what ``packing.write`` does."""
    own_mean = None if mean is None else mean.to(torch.float32).contiguous()
    own_chosen = None if chosen is None else chosen.contiguous()
    first = first_column // GROUP
    library().pack_rows(  # type: ignore[union-attr]
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        _address(own_chosen),
        _address(own_mean),
        stored.rows,
        x.shape[1],
        first_column,
        stored.seed,
        stored.bits,
        stored.rotated,
        _matrix(stored, x.shape[1], transpose=True),
        stored.codes.data_ptr() + first * 16 * stored.bits,
        stored.codes.stride(0),
        stored.ranges.data_ptr() + first * 4,
        stored.ranges.stride(0),
        threads_for(stored.rows * x.shape[1]),
    )


def read(
    stored: StoredRows,
    slab: slice,
    dtype: torch.dtype,
    scale: float,
    rotate_rows_back: bool,
    places: Tensor | None,
) -> Tensor:
    """Do what ``packing.read`` does."""
    first, end, _ = slab.indices(stored.rows if places is None else len(places))
    codes, ranges = stored.codes.contiguous(), stored.ranges.contiguous()  # hooks on saved tensors may have moved them
    out = codes.new_empty(end - first, stored.features, dtype=dtype)
    library().unpack_rows(  # type: ignore[union-attr]
        dtype == torch.bfloat16,
        codes.data_ptr(),
        codes.stride(0),
        ranges.data_ptr(),
        ranges.stride(0),
        _address(places),
        first,
        end - first,
        stored.features,
        stored.seed,
        stored.bits,
        stored.rotated,
        stored.rotated and rotate_rows_back,
        scale,
        _matrix(stored, stored.features, transpose=False),
        out.data_ptr(),
        threads_for(out.numel()),
    )
    return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _matrix(stored: StoredRows, features: int, *, transpose: bool) -> int | None:
    """Return the address of the transform of a shorter last group."""
    rest = features % GROUP
    return _padded_matrix(rest, transpose).data_ptr() if stored.rotated and rest else None


@cache  # its address is in use, and there are no more sizes than GROUP
def _padded_matrix(size: int, transpose: bool) -> Tensor:
    """Return the transform, without signs, its rows padded with zeros: (size, GROUP)."""
    matrix = transform_matrix(size, torch.device("cpu"), torch.float32)
    padded = torch.zeros(size, GROUP, dtype=torch.float32, device="cpu")  # whatever the defaults are
    padded[:, :size] = matrix.t() if transpose else matrix
    return padded

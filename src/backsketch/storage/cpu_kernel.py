"""The fused form on a CPU: rows to codes and back in one pass, compiled once with the C++ compiler of torch.compile.

The compiler is looked for when it is first needed, and what it made is kept in torch's own cache on disk. Where there
is none, or TORCHDYNAMO_DISABLE is set, the reference serves.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from ..torch_private import compiled_cpp, has_plain_memory
from .groups import GROUP
from .rotation import transform_matrix
from .stored_rows import StoredRows

_LEAST_VALUES = 1 << 15  # kept: for fewer, a process would take longer to load the kernel than it saves
_LEAST_FOR_THREADS = 1 << 16
_DTYPES = (torch.float32, torch.bfloat16)
_OFF = "TORCHDYNAMO_DISABLE"
_SOURCES = ("cpu_kernel.cpp", "cpu_slopes.cpp")  # compiled as one


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


def threads_for(values: int) -> int:
    """Return how many threads to use for so many values."""
    return torch.get_num_threads() if values >= _LEAST_FOR_THREADS else 1


def library() -> Any | None:
    """Return the compiled kernels, or None where there is no compiler; the first call may compile them."""
    found = _loaded()
    return None if isinstance(found, str) else found


def switched_off() -> bool:
    """Tell whether the user wants no fused kernels."""
    return os.environ.get(_OFF, "0") not in ("", "0")


def why_not() -> str | None:
    """Return why there are no compiled kernels here, or None if there are."""
    found = _loaded()
    return found if isinstance(found, str) else None


@lru_cache(maxsize=1)
def _loaded() -> Any | str:
    if switched_off():
        return f"{_OFF} is set"
    try:
        found = compiled_cpp("\n".join((files(__package__) / name).read_text("utf-8") for name in _SOURCES))
    except Exception as error:  # no compiler, no place to write, an older torch: many kinds of errors, and one remedy
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    number, pointer, size, real = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    found.pack_rows.argtypes = [number, pointer, size, pointer, pointer, size, size, size, size, number, number]
    found.pack_rows.argtypes += [pointer, pointer, size, pointer, size, number]
    found.unpack_rows.argtypes = [number, pointer, size, pointer, size, pointer, size, size, size, size]
    found.unpack_rows.argtypes += [number, number, number, real, pointer, pointer, number]
    ends = [*[size] * 4, real, real, number, pointer, number]
    found.write_slopes.argtypes = [number, number, pointer, *ends]
    found.times_slopes.argtypes = [number, pointer, pointer, *ends]
    for name in ("pack_rows", "unpack_rows", "write_slopes", "times_slopes"):
        getattr(found, name).restype = None
    return found


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

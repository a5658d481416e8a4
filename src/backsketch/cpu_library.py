"""What is compiled for a CPU: one library of C++, made once with the C++ compiler of torch.compile.

The compiler is looked for when it is first needed, and what it made is kept in torch's own cache on disk. Where there
is none, or TORCHDYNAMO_DISABLE is set, plain PyTorch serves.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from importlib.resources import files
from typing import Any

import torch

from .torch_private import compiled_cpp

_OFF = "TORCHDYNAMO_DISABLE"
_SOURCES = (
    "storage/cpu_kernel.cpp",
    "storage/cpu_slopes.cpp",
    "storage/cpu_flags.cpp",
    "sketches/smallest.cpp",
)  # compiled as one
_LEAST_FOR_THREADS = 1 << 16


def library() -> Any | None:
    """Return the compiled functions, or None where there is no compiler; the first call may compile them."""
    found = _loaded()
    return None if isinstance(found, str) else found


def why_not() -> str | None:
    """Return why there are no compiled functions here, or None if there are."""
    found = _loaded()
    return found if isinstance(found, str) else None


def switched_off() -> bool:
    """Tell whether the user wants no fused kernels."""
    return os.environ.get(_OFF, "0") not in ("", "0")


def threads_for(values: int) -> int:
    """Return how many threads to use for so many values."""
    return torch.get_num_threads() if values >= _LEAST_FOR_THREADS else 1


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
    found.write_flags.argtypes = found.read_flags.argtypes = [number, pointer, size, real, pointer, number]
    found.smallest.argtypes = [pointer, size, size, pointer]
    for name in ("pack_rows", "unpack_rows", "write_slopes", "times_slopes", "read_flags", "smallest"):
        getattr(found, name).restype = None
    return found

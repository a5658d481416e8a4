"""The fused form on an accelerator: Triton kernels, called as operators so that the meta device can stand in for it.

Triton comes with the CUDA and ROCm builds of torch. Where it is not installed, the reference serves.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..cpu_library import switched_off
from ..random_words import DITHER_STREAM, Seed, line
from ..torch_private import has_plain_memory
from .stored_rows import StoredRows

_DEVICES = ("cuda", "xpu", "meta")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serves(stored: StoredRows, x: Tensor | None, dtype: torch.dtype) -> bool:
    """Tell whether the kernels can pack x, or read rows in this type."""
    return serves_for(stored.codes if x is None else x, dtype)


def serves_for(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether kernels can read a tensor, with values of a type."""
    return tensor.device.type in _DEVICES and dtype in _DTYPES and has_plain_memory(tensor) and triton_is_here()


@lru_cache(maxsize=1)
def triton_is_here() -> bool:
    """Tell whether Triton is installed and not switched off."""
    return find_spec("triton") is not None and not switched_off()


def write(stored: StoredRows, x: Tensor, chosen: Tensor | None, mean: Tensor | None, first_column: int) -> None:
    """Do what ``packing.write`` does, in one launch."""
    torch.ops.backsketch.pack_rows(
        x,
        chosen,
        mean,
        stored.codes,
        stored.ranges,
        first_column,
        *dither_line(stored.seed),
        stored.bits,
        stored.rotated,
    )


def read(
    stored: StoredRows, slab: slice, dtype: torch.dtype, scale: float, rotate_rows_back: bool, places: Tensor | None
) -> Tensor:
    """Do what ``packing.read`` does, in one launch."""
    first, end, _ = slab.indices(stored.rows if places is None else len(places))
    rows: Tensor = torch.ops.backsketch.unpack_rows(
        stored.codes,
        stored.ranges,
        places,
        first,
        end - first,
        stored.features,
        *dither_line(stored.seed),
        stored.bits,
        stored.rotated,
        stored.rotated and rotate_rows_back,
        scale,
        dtype,
    )
    return rows


def dither_line(seed: Seed) -> tuple[int, int, Tensor | None]:
    """Return the slope and the offset of the dither as numbers, or as a tensor where the seed is one."""
    slope, offset = line(seed, DITHER_STREAM)
    if isinstance(slope, Tensor) or isinstance(offset, Tensor):
        return 0, 0, torch.stack((torch.as_tensor(slope), torch.as_tensor(offset)))
    return slope, offset, None


def _pack(x: Tensor, *arguments: Any) -> None:
    from .triton_launch import pack

    with on_device(x.device):
        pack(x, *arguments)


def _unpack(codes: Tensor, *arguments: Any) -> Tensor:
    from .triton_launch import unpack

    with on_device(codes.device):
        return unpack(codes, *arguments)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one, on which Triton launches its kernels."""
    chosen: AbstractContextManager[object] = getattr(torch, device.type).device(device)
    return chosen


def _pack_nothing(*arguments: Any) -> None:
    pass


def _unpacked_shape(codes: Tensor, ranges: Tensor, places: Tensor | None, *arguments: Any) -> Tensor:
    _, rows, features, *_, dtype = arguments
    return codes.new_empty(rows, features, dtype=dtype)


_library: Any = torch.library.Library("backsketch", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "pack_rows(Tensor x, Tensor? chosen, Tensor? mean, Tensor(a!) codes, Tensor(b!) ranges, int first_column, "
    "int slope, int offset, Tensor? line, int bits, bool rotated) -> ()"
)
_library.define(
    "unpack_rows(Tensor codes, Tensor ranges, Tensor? places, int first, int rows, int features, int slope, "
    "int offset, Tensor? line, int bits, bool rotated, bool turn, float scale, ScalarType dtype) -> Tensor"
)
_library.impl("pack_rows", _pack_nothing, "Meta")
_library.impl("unpack_rows", _unpacked_shape, "Meta")
for _key in ("CUDA", "XPU"):
    _library.impl("pack_rows", _pack, _key)
    _library.impl("unpack_rows", _unpack, _key)

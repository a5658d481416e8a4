"""Store kept rows in 8, 4, 3 or 2 bits a value and read them: by the C++ kernel, by Triton or in plain PyTorch.

Each row is cut into groups of GROUP values. A group is stored as codes 0 … 2^bits − 1 between its least and its largest
value. Rounding adds a dither u to the value in steps and drops the fraction; u is made again from the seed and
subtracted when the value is read. The error is then uniform in ± half a step and does not depend on the value: its mean
is 0 and its variance step²/12. docs/storage.md defines every byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from . import accelerator_kernel, cpu_kernel, reference
from .stored_rows import StoredRows


def write(
    stored: StoredRows, x: Tensor, chosen: Tensor | None = None, mean: Tensor | None = None, first_column: int = 0
) -> None:
    """Round x at random and store it: (rows, features).

    With ``chosen``, the indices of some rows of x, only these are stored. ``mean``, (features,), is subtracted from
    each row first. x may be some columns of the rows, which begin at ``first_column``, a multiple of GROUP. A group
    with NaN or infinity comes back without a finite value.
    """
    _kernels(stored, x, x.dtype).write(stored, x, chosen, mean, first_column)


def read(
    stored: StoredRows,
    slab: slice,
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
    rotate_rows_back: bool = True,
    places: Tensor | None = None,
) -> Tensor:
    """Return ``scale`` times some rows, which may be left rotated: (rows, features).

    With ``places``, return at each place the stored row that it names, or zeros where it is −1; ``slab`` then selects
    places, not stored rows. At a scale of 1/2 no finite value overflows, though rounding moves it.
    """
    return _kernels(stored, None, dtype).read(stored, slab, dtype, scale, rotate_rows_back, places)


def fused(stored: StoredRows, dtype: torch.dtype) -> bool:
    """Tell whether a fused kernel reads these rows, which it can rotate back in the same pass."""
    return _kernels(stored, None, dtype) is not reference


@contextmanager
def without_fused_kernels() -> Iterator[None]:
    """Inside the block, let the reference store and read all rows."""
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)


def fused_kernels_allowed() -> bool:
    """Tell whether no ``without_fused_kernels`` is around."""
    return _allowed.get()


_allowed = ContextVar("fused_kernels_allowed", default=True)


class _Kernels(Protocol):
    """A module that stores rows and reads them."""

    def write(
        self, stored: StoredRows, x: Tensor, chosen: Tensor | None, mean: Tensor | None, first_column: int
    ) -> None: ...

    def read(
        self,
        stored: StoredRows,
        slab: slice,
        dtype: torch.dtype,
        scale: float,
        rotate_rows_back: bool,
        places: Tensor | None,
    ) -> Tensor: ...


def _kernels(stored: StoredRows, x: Tensor | None, dtype: torch.dtype) -> _Kernels:
    if fused_kernels_allowed():
        for kernels in (cpu_kernel, accelerator_kernel):
            if kernels.serves(stored, x, dtype):
                return kernels
    return reference

"""Rotation of groups before rounding: outliers spread over their group, and its range falls to that of a Gaussian.

A group is multiplied by one fixed orthonormal matrix: signs, then a transform. The signs are the Rudin–Shapiro
sequence, under which a constant group spreads evenly too. The transform is Walsh–Hadamard's where the group's size is a
power of two, and else a cosine transform.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_FACTOR = 16  # a large Hadamard matrix is the product of two small ones, with fewer FLOPs


def rotate(groups: Tensor) -> Tensor:
    """Return the rotated groups, in memory of their own: (..., size) -> (..., size)."""
    return _transform(groups * _signs(groups.shape[-1], groups.device, groups.dtype), transpose=True)


def rotate_back(groups: Tensor) -> Tensor:
    """Undo ``rotate``, in memory of its own: (..., size) -> (..., size)."""
    signs = _signs(groups.shape[-1], groups.device, groups.dtype)
    return _transform(groups.clone(memory_format=torch.contiguous_format), transpose=False).mul_(signs)


def _transform(groups: Tensor, *, transpose: bool) -> Tensor:
    """Return groups · H or groups · Hᵀ; ``groups`` may be overwritten. Autocast leaves alone what goes to ``out``."""
    size, device, dtype = groups.shape[-1], groups.device, groups.dtype
    out = torch.empty_like(groups)
    if not _is_power_of_two(size) or size <= _FACTOR or device.type != "cpu":
        matrix = _matrix(size, device, dtype)
        torch.mm(groups.view(-1, size), matrix.t() if transpose else matrix, out=out.view(-1, size))
        return out
    torch.mm(groups.view(-1, _FACTOR), _matrix(_FACTOR, device, dtype), out=out.view(-1, _FACTOR))
    factors = (-1, size // _FACTOR, _FACTOR)
    torch.matmul(_matrix(size // _FACTOR, device, dtype), out.view(factors), out=groups.view(factors))
    return groups


@lru_cache(maxsize=64)
def _signs(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return −1 to the number of pairs of neighbouring ones in the place's binary digits: (size,)."""
    signs = [(-1.0) ** (place & place >> 1).bit_count() for place in range(size)]
    return torch.tensor(signs, dtype=dtype).to(device)


@lru_cache(maxsize=64)
def _matrix(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the orthonormal transform, one output a row, made on the host in fp64: (size, size)."""
    if _is_power_of_two(size):
        matrix = torch.ones(1, 1, dtype=torch.float64)
        pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        while len(matrix) < size:
            matrix = torch.kron(pair, matrix)
        matrix /= math.sqrt(size)
    else:
        place = torch.arange(size, dtype=torch.float64)
        matrix = torch.cos(math.pi / size * torch.outer(place, place + 0.5)) * math.sqrt(2 / size)
        matrix[0] /= math.sqrt(2)
    return matrix.to(dtype).to(device)


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0

"""Rotation of groups before rounding: outliers spread over their group, and its range falls to that of a Gaussian.

A group is multiplied by one fixed orthonormal matrix: signs, then a transform. The signs are the Rudin–Shapiro
sequence, under which a constant group spreads over half of its places or more. The transform is Walsh–Hadamard's where
the group's size is a power of two, and else a cosine transform.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..torch_private import transforms_active

_FACTOR = 16  # a large Hadamard matrix is the product of two small ones, with fewer FLOPs


def rotate(groups: Tensor) -> Tensor:
    """Return the rotated groups, in memory of their own: (..., size) -> (..., size)."""
    size, device, dtype = groups.shape[-1], groups.device, groups.dtype
    if _in_one_product(groups):
        return _times(groups, _rotation(size, device, dtype))
    own = torch.empty_like(groups, memory_format=torch.contiguous_format)
    return _transform(torch.mul(groups, _signs(size, device, dtype), out=own))


def rotate_back(groups: Tensor) -> Tensor:
    """Undo ``rotate``, in memory of its own: (..., size) -> (..., size)."""
    size, device, dtype = groups.shape[-1], groups.device, groups.dtype
    if _in_one_product(groups):
        return _times(groups, _rotation(size, device, dtype).t())
    return _transform(groups.clone(memory_format=torch.contiguous_format)).mul_(_signs(size, device, dtype))


def _in_one_product(groups: Tensor) -> bool:
    """Tell whether to multiply by the whole matrix, and not by small factors, with fewer FLOPs but more steps.

    Under torch.func too, where a batched product cannot be written to memory of its own.
    """
    size = groups.shape[-1]
    if transforms_active():
        return True
    return groups.device.type != "cpu" or not _is_power_of_two(size) or size <= _FACTOR


def _times(groups: Tensor, matrix: Tensor) -> Tensor:
    # Autocast leaves alone what goes to ``out``.
    out = torch.empty_like(groups, memory_format=torch.contiguous_format)
    torch.mm(groups.reshape(-1, len(matrix)), matrix, out=out.view(-1, len(matrix)))
    return out


def _transform(groups: Tensor) -> Tensor:
    """Return groups · H for a symmetric H that is the product of two small ones; ``groups`` is overwritten."""
    size, device, dtype = groups.shape[-1], groups.device, groups.dtype
    out = torch.empty_like(groups)
    torch.mm(groups.view(-1, _FACTOR), transform_matrix(_FACTOR, device, dtype), out=out.view(-1, _FACTOR))
    factors = (-1, size // _FACTOR, _FACTOR)
    torch.matmul(transform_matrix(size // _FACTOR, device, dtype), out.view(factors), out=groups.view(factors))
    return groups


@lru_cache(maxsize=64)
def _rotation(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the matrix by which a group is multiplied: (size, size)."""
    host = torch.device("cpu")
    signed = transform_matrix(size, host, dtype).t() * _signs(size, host, dtype).unsqueeze(1)
    return signed.contiguous().to(device)


@lru_cache(maxsize=64)
def _signs(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return −1 to the number of pairs of neighbouring ones in the place's binary digits: (size,)."""
    signs = [(-1.0) ** (place & place >> 1).bit_count() for place in range(size)]
    return torch.tensor(signs, dtype=dtype, device="cpu").to(device)


@lru_cache(maxsize=64)
def transform_matrix(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the orthonormal transform, one output a row, made on the host in fp64: (size, size)."""
    if _is_power_of_two(size):
        matrix = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu")
        while len(matrix) < size:
            matrix = torch.kron(pair, matrix)
        matrix /= math.sqrt(size)
    else:
        place = torch.arange(size, dtype=torch.float64, device="cpu")
        matrix = torch.cos(math.pi / size * torch.outer(place, place + 0.5)) * math.sqrt(2 / size)
        matrix[0] /= math.sqrt(2)
    return matrix.to(dtype).to(device)


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0

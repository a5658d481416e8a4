"""Random numbers that are a pure function of (seed, stream, position), in integer arithmetic.

The same seed gives the same numbers, bit for bit, on every device, in eager mode, in a compiled graph and in a fused
kernel. No generator is made, and nothing waits for a device. docs/storage.md defines the function.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

Seed: TypeAlias = int | Tensor  # a number on the host, or a () int64 tensor on a device, where reading it would wait

# What random numbers are for. Streams of one seed are independent.
SKETCH_STREAM, DITHER_STREAM = 1, 2

_WORD = 0xFFFFFFFF


def random_words(seed: Seed, stream: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return 32 random bits for each of the positions ``first`` … ``first + count − 1``: (count,) int64."""
    low, high = _mix((seed & _WORD) ^ stream), _mix((seed >> 32) & _WORD)
    positions = torch.arange(first, first + count, device=device)
    words: Tensor = _mix((_mix(positions ^ low) + high) & _WORD)
    return words


def _mix(x: Any) -> Any:
    """Apply, to a number or a tensor of them, a bijection of 32-bit integers in which every bit depends on every other.

    Both factors are below 2³¹, so that no product leaves 63 bits.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
    return x ^ (x >> 15)

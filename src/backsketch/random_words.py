"""Random numbers that are a pure function of (seed, stream, position), in integer arithmetic.

The same seed gives the same numbers, bit for bit, on every device, in eager mode, in a compiled graph and in a fused
kernel. No generator is made, and nothing waits for a device. docs/storage.md defines the functions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

Seed: TypeAlias = int | Tensor  # a number on the host, or a () int64 tensor on a device, where reading it would wait

# What random numbers are for. Streams of one seed are independent.
SKETCH_STREAM, DITHER_STREAM, CHOICE_STREAM = 1, 2, 3

_WORD = 0xFFFFFFFF


def random_words(seed: Seed, stream: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return 32 random bits for each of the positions ``first`` … ``first + count − 1``: (count,) int64."""
    words: Tensor = _word(seed, stream, torch.arange(first, first + count, device=device))
    return words


def pairwise_words(seed: Seed, stream: int, count: int, device: torch.device) -> Tensor:
    """Return 64-bit numbers, all different, for the positions 0 … count − 1: (count,) int64.

    The upper 32 bits of any two are independent. They take one operation where ``random_words`` takes two dozen: a
    line through the mixed positions, mod 2⁶⁴.
    """
    slope, offset = line(seed, stream)
    mixed = mixed_positions(count, device)
    if isinstance(slope, Tensor):
        return mixed.mul(slope).add_(offset)
    return torch.rsub(mixed, offset, alpha=-slope)


def order_words(seed: Seed, stream: int, count: int, device: torch.device) -> Tensor:
    """Return 64-bit numbers whose order is a random one, for the positions 0 … count − 1: (count,) int64.

    They are squares, mod 2⁶⁴. A line will not do: the places of three of its numbers on the circle mod 2⁶⁴ depend on
    each other, and some sets of positions would have the smallest numbers more often than others.
    """
    words = pairwise_words(seed, stream, count, device)
    return words.mul_(words)


def line(seed: Seed, stream: int) -> tuple[Seed, Seed]:
    """Return the slope, an odd number, and the offset of ``pairwise_words``, as signed 64-bit integers."""
    words = [_word(seed, stream, _WORD - place) for place in range(4)]
    return _signed(words[0], words[1] | 1), _signed(words[2], words[3])


def mixed_positions(count: int, device: torch.device) -> Tensor:
    """Return the positions 0 … count − 1, each mixed into 32 bits: (count,) int64. Do not change them."""
    return _mixed_positions(1 << max(count - 1, 1).bit_length(), device)[:count]


@lru_cache(maxsize=16)
def _mixed_positions(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        mixed: Tensor = _mix(torch.arange(count, device=device))
        return mixed


def _word(seed: Seed, stream: int, position: Any) -> Any:
    low, high = _mix((seed & _WORD) ^ stream), _mix((seed >> 32) & _WORD)
    return _mix((_mix(position ^ low) + high) & _WORD)


def _signed(high: Any, low: Any) -> Any:
    """Return high · 2³² + low as a signed 64-bit integer, for words of 32 bits."""
    if isinstance(high, Tensor):
        return (high << 32) | low  # the sign bit is the highest one
    return ((high << 32 | low) ^ 1 << 63) - (1 << 63)


def _mix(x: Any) -> Any:
    """Apply, to a number or a tensor of them, a bijection of 32-bit integers in which every bit depends on every other.

    Both factors are below 2³¹, so that no product leaves 63 bits.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
    return x ^ (x >> 15)

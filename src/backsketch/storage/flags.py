"""Flags in one bit each, exact.

Bit j of byte i is flag number j · bytes + i, and bits that are left over are 0. So a byte is made of eight contiguous
parts: on a CPU one after the other, without a helper as large as the flags; elsewhere, where each step has its price,
all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor


def write_flags(flags: Tensor) -> Tensor:
    """Return the bits of some flags, bool of any shape: -> (bytes,) uint8, an eighth of their number, rounded up."""
    values = flags.reshape(-1).view(torch.uint8)
    return _write_in_parts(values) if flags.device.type == "cpu" else _write_at_once(values)


def read_flags(bits: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the flags that ``write_flags`` stored: -> bool of the given shape, contiguous."""
    count = torch.Size(shape).numel()
    flags = _read_in_parts(bits, count) if bits.device.type == "cpu" else _read_at_once(bits, count)
    return flags.view(tuple(shape))


def flag_bytes(count: int) -> int:
    """Return how many bytes ``count`` flags take."""
    return -(-count // 8)


def _write_in_parts(values: Tensor) -> Tensor:
    bits = values.new_zeros(flag_bytes(len(values)))
    for bit, here in _parts(len(values)):
        bits[: here.stop - here.start].add_(values[here], alpha=1 << bit)
    return bits


def _read_in_parts(bits: Tensor, count: int) -> Tensor:
    flags = bits.new_empty(count, dtype=torch.bool)
    for bit, here in _parts(count):
        flags[here] = bits[: here.stop - here.start] & (1 << bit)  # what is not 0 becomes True
    return flags


def _parts(count: int) -> Iterator[tuple[int, slice]]:
    """Yield (bit, flags that take this bit of a byte)."""
    size = flag_bytes(count)
    for bit in range(8):
        start, end = bit * size, min((bit + 1) * size, count)
        if start < end:
            yield bit, slice(start, end)


def _write_at_once(values: Tensor) -> Tensor:
    missing = -len(values) % 8
    whole = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return (whole.view(8, flag_bytes(len(values))) * _masks(values.device)).sum(0, dtype=torch.uint8)


def _read_at_once(bits: Tensor, count: int) -> Tensor:
    return (bits & _masks(bits.device)).ne(0).view(-1)[:count]


@lru_cache(maxsize=32)
def _masks(device: torch.device) -> Tensor:
    """Return the eight bits of a byte, the lowest first: (8, 1) uint8."""
    with torch.inference_mode(False):
        return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device="cpu").unsqueeze(1).to(device)

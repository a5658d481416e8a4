"""The layout of codes: a group of few-bit codes as whole bytes, and back.

A group is folded in halves until eight bits are in a byte: its second half goes above the bits of its first. Four bits
take one fold, two bits two, one bit three. Three bits are stored as two bits, then one.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # the bits of a code, the lowest first, by how they are folded


def group_bytes(count: int, bits: int) -> int:
    """Return how many bytes the codes of one group of ``count`` values take."""
    return sum(-(-count * width // 8) for width in _PLANES[bits])


def join(codes: Tensor, bits: int, *, out: Tensor) -> None:
    """Write the codes of some groups, each below 2^bits, as bytes: (..., count) uint8 -> (..., group_bytes)."""
    start = shift = 0
    for width in _PLANES[bits]:
        plane = codes >> shift if shift else codes if width == bits else codes & 2**width - 1
        end = start + -(-codes.shape[-1] * width // 8)
        _fold(plane, width, out[..., start:end])
        start, shift = end, shift + width


def split(joined: Tensor, bits: int, count: int) -> Tensor:
    """Return the codes of groups of ``count`` values: (..., group_bytes) uint8 -> (..., count)."""
    start = shift = 0
    codes = joined
    for width in _PLANES[bits]:
        end = start + -(-count * width // 8)
        plane = _unfold(joined[..., start:end], width, count)
        codes = codes.add(plane, alpha=2**shift) if shift else plane
        start, shift = end, shift + width
    return codes


def whole_part(values: Tensor, bits: int) -> Tensor:
    """Drop the fractions, as ``to(torch.uint8)`` does; going by a signed type takes PyTorch half of that time."""
    if bits == 8:
        return values.to(torch.int16).to(torch.uint8)
    # What NaN became must not spill into its neighbours.
    return values.to(torch.int8).view(torch.uint8).bitwise_and_(2**bits - 1)


def _fold(codes: Tensor, width: int, out: Tensor) -> None:
    while width < 8:
        count = codes.shape[-1]
        half = -(-count // 2)
        if count % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        width *= 2
        target = out if width == 8 else None
        codes = torch.add(codes[..., :half], codes[..., half:], alpha=2 ** (width // 2), out=target)
    if codes is not out:
        out.copy_(codes)


def _unfold(joined: Tensor, width: int, count: int) -> Tensor:
    if count * width % 8 == 0 and joined.device.type != "cpu":  # no code is missing, and each step has its price
        apart = joined.unsqueeze(-2).bitwise_right_shift(_shifts(width, joined.device))
        return apart.bitwise_and_(2**width - 1).flatten(-2) if width < 8 else joined
    counts = [count]  # how many are left after each fold
    while width * 2 ** len(counts) <= 8:
        counts.append(-(-counts[-1] // 2))
    kept = 8
    for unfolded in reversed(counts[:-1]):
        kept //= 2
        codes = joined.new_empty(*joined.shape[:-1], unfolded)
        half = joined.shape[-1]
        torch.bitwise_and(joined, 2**kept - 1, out=codes[..., :half])
        torch.bitwise_right_shift(joined[..., : unfolded - half], kept, out=codes[..., half:])
        joined = codes
    return joined


@lru_cache(maxsize=32)
def _shifts(width: int, device: torch.device) -> Tensor:
    """Return where in a byte the codes of each part of a group are: (parts, 1) uint8. The first fold is the lowest."""
    folds = (8 // width).bit_length() - 1
    shifts = [sum(width << fold for fold in range(folds) if part >> folds - 1 - fold & 1) for part in range(8 // width)]
    return torch.tensor(shifts, dtype=torch.uint8, device="cpu").unsqueeze(1).to(device)

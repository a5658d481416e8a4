"""The one place that touches the global generator, for a seed for each sketch; and generators set to such a seed."""

from __future__ import annotations

import torch
from torch import Tensor

_RANK_STRIDE = 0x9E3779B97F4A7C15 & (2**63 - 1)  # odd, so ranks differ in the low 32 bits that CPU generators use


def draw_seed() -> Tensor:
    """Draw 8 bytes from the default CPU generator, mixed with this process's rank: () int64.

    On the CPU whatever the layer's device, so that reading it never waits for an accelerator; mixed with the rank
    because ranks that share S share its error, which then no longer averages out.
    """
    # Not changed in place: selective checkpointing may have cached it.
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
    if rank := _rank():
        return seed.bitwise_xor((rank * _RANK_STRIDE) % 2**63)
    return seed


def generator_at(seed: int, device: torch.device) -> torch.Generator:
    """Return a fresh generator on ``device``, set to ``seed``."""
    return torch.Generator(device=device).manual_seed(seed)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0

"""The one place that touches torch's global generators: it draws a seed for each sketch."""

from __future__ import annotations

import torch
from torch import Tensor

from .random_words import Seed

_HOST = torch.device("cpu")
_RANK_STRIDE = 0x9E3779B97F4A7C15 & (2**63 - 1)  # odd, so ranks differ in the low 32 bits too


def draw_seed(device: torch.device = _HOST) -> Tensor:
    """Draw 8 bytes from the default CPU generator, mixed with this process's rank: () int64.

    On the CPU whatever the layer's ``device``, so that reading it never waits for an accelerator; mixed with the rank
    because ranks that share S share its error, which then no longer averages out. While a CUDA graph is captured, it
    comes from the device's generator, so that each replay of the graph draws another one.
    """
    # Not changed in place: selective checkpointing may have cached it.
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device=device if is_capturing(device) else _HOST)
    if rank := _rank():
        return seed.bitwise_xor((rank * _RANK_STRIDE) % 2**63)
    return seed


def is_capturing(device: torch.device) -> bool:
    """Tell whether what runs on ``device`` becomes part of a CUDA graph, in which nothing can be read back."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def seed_value(seed: Tensor) -> Seed:
    """Return the number that a seed is, or the seed itself on an accelerator, where reading it would wait."""
    return int(seed) if seed.is_cpu else seed


def generator_at(seed: int, device: torch.device) -> torch.Generator:
    """Return a fresh generator on ``device``, set to ``seed``."""
    return torch.Generator(device=device).manual_seed(seed)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0

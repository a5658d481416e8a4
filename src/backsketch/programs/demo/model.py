"""ByteModel: a small GPT over bytes, built of plain nn.Linear layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Size:
    """How large the model is."""

    hidden: int = 192
    heads: int = 4
    layers: int = 4
    length: int = 128


class Block(nn.Module):
    """Causal attention and a feed-forward part, each after a layer norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention, self.before_forward = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.query, self.key, self.value, self.out = (nn.Linear(size.hidden, size.hidden) for _ in range(4))
        self.up, self.down = nn.Linear(size.hidden, 4 * size.hidden), nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden states: (batch, length, hidden) -> the same."""
        read = self.before_attention(hidden)
        query, key, value = (
            part(read).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        after: Tensor = hidden + self.down(F.gelu(self.up(self.before_forward(hidden))))
        return after


class ByteModel(nn.Module):
    """Predict the next byte: (batch, length) -> (batch, length, 256)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, size.hidden), nn.Embedding(size.length, size.hidden)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, 256)

    def forward(self, values: Tensor) -> Tensor:
        """Return the logits of every next byte."""
        hidden = self.bytes(values) + self.places(torch.arange(values.shape[1], device=values.device))
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


def next_byte_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Return the mean loss in nats a byte: text (batch, length + 1) -> ()."""
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

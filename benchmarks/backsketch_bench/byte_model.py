"""A small byte-level transformer of plain nn.Linear, trained on the sources of Python's standard library.

Its examples are paragraphs of code, so they differ in length, and batches are padded as text is.
"""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activations import Batch, Subject

BATCH, LEARNING_RATE, FILES = 32, 1e-3, 100


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
        read = self.before_attention(hidden)
        query, key, value = (
            part(read).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.before_forward(hidden))))


class ByteModel(nn.Module):
    """Predict the next byte: (batch, length) -> (batch, length, 256)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, size.hidden), nn.Embedding(size.length, size.hidden)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, 256)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.bytes(values) + self.places(torch.arange(values.shape[1], device=values.device))
        return self.head(self.norm(self.blocks(hidden)))


def byte_subject(*, steps: int, seed: int, size: Size | None = None) -> Subject:
    """Return the model with random weights and paragraphs of the standard library to train it on."""
    size = Size() if size is None else size
    paragraphs = read_paragraphs(size.length)
    chosen = random.Random(seed)

    def draw() -> Batch:
        batch = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in chosen.sample(paragraphs, BATCH)]
        values = nn.utils.rnn.pad_sequence(batch, batch_first=True).long()
        return {"values": values[:, :-1], "next": values[:, 1:], "attention_mask": values[:, 1:] != 0}

    settings = {"model": "byte model", "data": "Python's standard library", "batch": BATCH, "steps": steps}
    return Subject(ByteModel(size), draw, _loss, {**settings, "seed": seed}, steps, LEARNING_RATE)


def read_paragraphs(length: int) -> list[bytes]:
    """Return the paragraphs of the first FILES modules of the standard library, cut to ``length`` + 1 bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:FILES]
    paragraphs = (text.strip() for file in files for text in file.read_bytes().split(b"\n\n"))
    return [text[: length + 1] for text in paragraphs if len(text) > 16 and 0 not in text]


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["values"])
    return F.cross_entropy(logits[batch["attention_mask"]], batch["next"][batch["attention_mask"]])

"""The demo's byte-level transformer, trained on paragraphs of the sources of Python's standard library.

Paragraphs differ in length, so batches are padded as text is.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backsketch.programs.demo.model import ByteModel, Size

from .activations import Batch, Subject

BATCH, LEARNING_RATE, FILES = 32, 1e-3, 100


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

"""A pretrained causal language model, to be trained on windows of a text."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from .activations import Batch, Subject

BATCH, LENGTH, LEARNING_RATE = 4, 128, 1e-4


def language_model_subject(model: Path, text: Path, *, steps: int, seed: int) -> Subject:
    """Load a causal language model by path, and a text for it. No window is padded.

    The output head is left out: its gradient has a column for each word of the vocabulary, and where it is tied to the
    embedding, its weight gets a gradient from there too.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokens = transformers.AutoTokenizer.from_pretrained(model)(text.read_text(encoding="utf-8"))["input_ids"]
    if len(tokens) <= LENGTH:
        raise ValueError(f"text must have more than {LENGTH} tokens, got {len(tokens)} in {text}")
    language_model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    head = language_model.get_output_embeddings()
    heads = [name for name, module in language_model.named_modules() if module is head]
    chosen = random.Random(seed)

    def draw() -> Batch:
        starts = [chosen.randrange(len(tokens) - LENGTH) for _ in range(BATCH)]
        windows = torch.tensor([tokens[start : start + LENGTH] for start in starts])
        return {"input_ids": windows, "labels": windows, "attention_mask": torch.ones_like(windows)}

    settings = {"model": model.name, "data": text.name, "batch": BATCH, "length": LENGTH, "steps": steps, "seed": seed}
    return Subject(language_model, draw, _loss, {**settings, "left_out": heads}, steps, LEARNING_RATE, tuple(heads))


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss

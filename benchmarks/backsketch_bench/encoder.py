"""A pretrained encoder with a classification head, to be fine-tuned on a file of labelled text."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from .activations import Batch, Subject

BATCH, LENGTH, LEARNING_RATE = 32, 128, 5e-5


@dataclass(frozen=True, slots=True)
class Example:
    """One labelled text, or pair of texts."""

    label: int
    texts: tuple[str, ...]


def encoder_subject(model: Path, data: Path, columns: Sequence[str], *, steps: int, seed: int) -> Subject:
    """Load an encoder by path, with a new head for the classes of the file."""
    examples = read_examples(data, columns)
    classes = 1 + max(example.label for example in examples)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = {"num_labels": classes, "ignore_mismatched_sizes": True}  # a head of another task gives way to a new one
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    encoder = transformers.AutoModelForSequenceClassification.from_pretrained(model, **options)
    chosen = random.Random(seed)

    def draw() -> Batch:
        batch = chosen.sample(examples, BATCH)
        texts = list(zip(*(example.texts for example in batch), strict=True))
        encoded = tokenizer(
            *(list(text) for text in texts), padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        return {**encoded, "labels": torch.tensor([example.label for example in batch])}

    settings = {"model": model.name, "data": "/".join(data.parts[-2:]), "batch": BATCH, "steps": steps, "seed": seed}
    return Subject(encoder, draw, _loss, settings, steps, LEARNING_RATE)


def read_examples(path: Path, columns: Sequence[str]) -> list[Example]:
    """Read a tab-separated file without quoting: the columns of the label and of one or two texts."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if all(column.isdecimal() for column in columns):
        places = [int(column) for column in columns]
    else:
        header, *rows = rows
        if missing := [column for column in columns if column not in header]:
            raise ValueError(f"columns must be among {', '.join(header)}, got {', '.join(missing)}")
        places = [header.index(column) for column in columns]
    rows = [row for row in rows if len(row) > max(places)]
    if len(rows) < BATCH:
        raise ValueError(f"data must have at least {BATCH} examples with these columns, got {len(rows)} in {path}")
    label, *texts = places
    classes = {name: number for number, name in enumerate(sorted({row[label] for row in rows}))}
    return [Example(classes[row[label]], tuple(row[text] for text in texts)) for row in rows]


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss

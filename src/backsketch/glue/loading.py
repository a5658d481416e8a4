"""Loading a model with its tokenizer, and encoding sentences for it."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from ..conversion import sketched_type
from .reading import Examples
from .settings import Settings


def load(settings: Settings) -> tuple[nn.Module, Any]:
    """Return the model with a head for the task, and its tokenizer."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    task = settings.the_task
    # A head of another task is replaced by a new one.
    options: dict[str, Any] = {"num_labels": task.outputs, "ignore_mismatched_sizes": True}
    if task.regression:
        options["problem_type"] = "regression"
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        model = AutoModelForSequenceClassification.from_pretrained(settings.model, **options)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model {settings.model!r} could not be loaded: {reason}") from error
    return model, tokenizer


def check_exclude(settings: Settings, model: nn.Module) -> None:
    """Raise ValueError where a pattern matches nothing, or all patterns together everything."""
    layers = [name for name, module in model.named_modules() if sketched_type(module) is not None]
    for glob in settings.exclude or ():
        if not any(fnmatchcase(name, glob) for name in layers):
            raise ValueError(f"exclude: {glob!r} matches no linear layer of the model; one of them is {layers[0]!r}")
    for glob in settings.noise_layers:
        if not any(fnmatchcase(name, glob) and not settings.excluded(name) for name in layers):
            raise ValueError(f"noise_layers: {glob!r} matches no sketched layer; the model has {layers[0]!r}")
    if settings.config is not None and all(settings.excluded(name) for name in layers):
        raise ValueError("exclude leaves no linear layer to sketch")


def encode(examples: Examples, model: nn.Module, tokenizer: Any, max_length: int) -> list[dict[str, Any]]:
    """Return the examples as the Trainer takes them, cut off where the model or ``max_length`` ends."""
    positions = getattr(model.config, "max_position_embeddings", math.inf)
    length = int(min(max_length, tokenizer.model_max_length, positions))
    columns = [list(column) for column in zip(*examples.texts, strict=True)]
    encoded = tokenizer(*columns, truncation=True, max_length=length)
    return [
        {**{name: values[i] for name, values in encoded.items()}, "labels": label}
        for i, label in enumerate(examples.labels)
    ]

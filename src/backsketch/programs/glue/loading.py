"""Loading a model with its tokenizer, and encoding sentences for it."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from ...convert.layer_classes import sketched_type
from .reading import Examples
from .settings import Settings


def load(settings: Settings) -> tuple[nn.Module, Any]:
    """Return the model with a head for the task, and its tokenizer."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    task = settings.the_task
    options = {
        "num_labels": task.outputs,
        "ignore_mismatched_sizes": True,  # a head with other outputs is replaced by a new one
        "problem_type": "regression" if task.regression else "single_label_classification",
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            settings.model, **options, output_loading_info=True
        )
    except Exception as error:  # broken files raise many kinds of errors
        reason = " ".join(str(error).split())
        raise ValueError(f"model {settings.model!r} could not be loaded: {type(error).__name__}: {reason}") from error
    _check_weights(settings.model, model, found)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(f"model {settings.model!r} has no vocabulary: the files of its tokenizer are missing")
    if tokenizer.pad_token is None:  # decoders are often trained without
        if tokenizer.eos_token is None:
            raise ValueError(f"model {settings.model!r} must have a token for padding or for the end, got neither")
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _check_weights(name: str, model: nn.Module, found: dict[str, Any]) -> None:
    """Raise ValueError if the files have no fitting weights for some part of the model other than its head."""
    others = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
    random = sorted(key for key in others if key.startswith(f"{model.base_model_prefix}.") and "pooler" not in key)
    if random:
        raise ValueError(
            f"model {name!r} has no weights that fit for {len(random)} of its parameters, among them {random[0]!r}"
        )


def check_length(settings: Settings, tokenizer: Any) -> None:
    """Raise ValueError if ``max_length`` leaves no space for a word."""
    pair, length = len(settings.the_task.texts) == 2, settings.the_recipe.max_length
    special = tokenizer.num_special_tokens_to_add(pair)
    if length <= special:
        raise ValueError(f"max_length must be above {special}, the special tokens of this model, got {length}")


def check_exclude(settings: Settings, model: nn.Module) -> None:
    """Raise ValueError if a pattern matches nothing, or if all patterns together match every layer."""
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
    """Return the examples as the Trainer takes them, cut off at ``max_length`` or at the model's limit."""
    length = int(min(max_length, tokenizer.model_max_length, _positions(model)))
    columns = [list(column) for column in zip(*examples.texts, strict=True)]
    encoded = tokenizer(*columns, truncation=True, max_length=length)
    return [
        {**{name: values[i] for name, values in encoded.items()}, "labels": label}
        for i, label in enumerate(examples.labels)
    ]


def _positions(model: nn.Module) -> float:
    """Return how many tokens the model has positions for; models like RoBERTa start after the padding position."""
    positions: float = getattr(model.config, "max_position_embeddings", math.inf)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return positions - module.padding_idx - 1
    return positions

"""Measure a whole encoder: the time of its step, what it keeps for backward and its peak."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .contenders import Contender, encoder_contenders
from .speed_steps import model_bytes, model_step
from .timing import best_times


def encoder(quick: bool, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Time a whole encoder without dropout, and all alternatives."""
    return _encoder(encoder_contenders(dtype), 0.0, quick, dtype)


def dropout(quick: bool) -> list[dict[str, Any]]:
    """Time the same encoder with the dropout it is fine-tuned with, whose masks torch draws on one core."""
    ways = [way for way in encoder_contenders() if way.family in ("exact", "recommended", "rows")]
    return _encoder(ways, 0.1, quick, torch.float32)


def _encoder(ways: list[Contender], dropout: float, quick: bool, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Time an encoder of RoBERTa-base's shapes, randomly initialised, forward and backward."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    depth, batch, length = encoder_size(quick)
    config = RobertaConfig(
        num_hidden_layers=depth,
        vocab_size=1000,
        max_position_embeddings=length + 2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    config._attn_implementation, config.use_cache = "sdpa", False
    model = RobertaForSequenceClassification(config).to(dtype).train()
    inputs = {"input_ids": torch.randint(5, 1000, (batch, length)), "labels": torch.randint(0, 2, (batch,))}
    entries: list[dict[str, Any]] = []
    for way in ways:
        kept, peak = model_bytes(way, model, inputs)
        entries.append({"name": way.name, "family": way.family, "ratio": way.ratio, "kept": kept, "peak": peak})
    times = best_times(
        {way.name: model_step(way, model, inputs) for way in ways},
        rounds=1 if quick else 5,
        title=f"encoder, {str(dtype).removeprefix('torch.')}",
        prepare={way.name: partial(way.applied, model) for way in ways},  # ten copies would not fit in memory
    )
    for entry in entries:
        entry["seconds"] = times[entry["name"]]
        entry["speed"] = times["exact"] / entry["seconds"]
    return entries


def encoder_size(quick: bool) -> tuple[int, int, int]:
    """Return blocks, batch and length; with fewer tokens the peak would be weights and their gradients alone."""
    return (1, 16, 64) if quick else (12, 32, 128)

"""step_memory: what a training step keeps and where it peaks, on the largest batch that a run can meet."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorWithPadding

from ...convert.conversion import Configs, Where, sketch_
from ...memory.peak import peak_memory
from ...memory.saved import saved_memory
from ...rest.rest_config import Rest


def largest_batch(encoded: list[dict[str, Any]], tokenizer: Any, size: int) -> dict[str, Any]:
    """Return the longest examples as a batch: the one at which a run peaks."""
    longest = sorted(encoded, key=lambda example: -len(example["input_ids"]))[:size]
    return dict(DataCollatorWithPadding(tokenizer)(longest))


def step_memory(
    model: nn.Module, batch: dict[str, Any], configs: Configs | None, where: Where, rest: Rest = None
) -> dict[str, Any]:
    """Return the bytes kept for backward and the peak of a step of AdamW, with the optimizer's states in place.

    The step runs on a copy, and the random generators are restored: the model and its run do not change.

    Args:
        batch: as the model takes it, labels included.
        configs, rest: as ``sketch_`` takes them; without configs all layers are exact.
    """
    device = next(model.parameters()).device
    batch = {name: value.to(device) for name, value in batch.items()}
    model = copy.deepcopy(model).train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same warnings were given when training began
        if configs is not None:
            sketch_(model, configs, where, rest=rest)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)  # as the Trainer's
        with saved_memory(model) as kept:
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with peak_memory(model, optimizer) as peak:
            model(**batch).loss.backward()
            optimizer.step()
    place = peak.place
    return {
        "batch_shape": list(batch["input_ids"].shape),
        "kept_bytes": kept.most_activations,
        "peak_bytes": peak.total,
        "peak_parts": peak.parts,
        "peak_place": None if place is None else str(place),
        "cuda_peak_bytes": peak.cuda,
    }

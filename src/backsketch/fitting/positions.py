"""How long the examples of a model may be."""

from __future__ import annotations

from torch import nn

from ..memory.meta_device import meta_step
from ..memory.training_step import Loss, forward_to_loss
from .batches import BatchMaker


def positions(model: nn.Module) -> int | None:
    """Return how many tokens the model has positions for, or None if it has no limit."""
    config = getattr(model, "config", None)
    told = [getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions")]
    limits = [limit for limit in told if isinstance(limit, int) and limit > 0]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa's positions start after it
            limits.append(module.num_embeddings - unused)
    return min(limits, default=None)


def takes_lengths(model: nn.Module, batches: BatchMaker, loss: Loss | None, batch: int, length: int) -> bool:
    """Tell whether a model on the meta device runs at twice a length, which may be a number of channels instead."""
    args, kwargs = batches(batch, 2 * length)
    try:
        with meta_step():
            forward_to_loss(model, args, kwargs, loss)
    except Exception:  # whatever a model raises if it does not take a shape
        return False
    return True

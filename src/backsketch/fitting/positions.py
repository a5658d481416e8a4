"""How many tokens a model has positions for."""

from __future__ import annotations

from torch import nn


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

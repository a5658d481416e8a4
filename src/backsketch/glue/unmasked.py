"""SketchPaddingToo: sketch padded rows like all others, as the paper does."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from ..integrations.session import unwrapped
from ..padding import ignore_attention_mask


class SketchPaddingToo(TrainerCallback):  # type: ignore[misc]
    """Make a model that SketchCallback has converted ignore its attention mask."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Undo what conversion set up."""
        ignore_attention_mask(unwrapped(model))

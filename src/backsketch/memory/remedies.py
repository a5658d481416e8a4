"""What would lower the peak of a training step, by what that peak is made of."""

from __future__ import annotations

from ..table import readable
from .live_storages import ACTIVATIONS, GRADIENTS, PARAMETERS, TRANSIENTS, Peak

_WORTH = 0.05  # a part that is less of the peak than this is not worth another way to train


def remedies(peak: Peak, loss_bytes: int) -> tuple[str, ...]:
    """Name what would lower the peak, what it could free most of first.

    Args:
        loss_bytes: how many of the peak's activations and transients are the logits and their loss.
    """
    parts = peak.parts
    computed = max(parts[ACTIVATIONS] + parts[TRANSIENTS] - loss_bytes, 0)
    weights = parts[PARAMETERS] + parts[GRADIENTS]
    found = [
        (computed, f"gradient checkpointing ({readable(computed)} are activations, which it computes again)"),
        (loss_bytes, f"a fused loss ({readable(loss_bytes)} are the logits and their loss)"),
        (
            weights,
            f"LoRA or quantised weights ({readable(weights)} are parameters and gradients, of which a sketch lowers "
            "nothing: it counts for more with a larger batch)",
        ),
    ]
    worth = [(size, text) for size, text in found if size >= _WORTH * peak.total]
    return tuple(text for _, text in sorted(worth, key=lambda each: -each[0]))

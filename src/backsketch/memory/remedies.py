"""Other ways to lower the peak of a training step than a sketch, found from what is in memory at the peak."""

from __future__ import annotations

from ..table import readable
from .live_storages import ACTIVATIONS, GRADIENTS, PARAMETERS, TRANSIENTS, Peak

_WORTH = 0.05  # a way that cannot free this share of the peak is not named


def remedies(peak: Peak, loss_bytes: int, fused: str) -> tuple[str, ...]:
    """Return other ways to lower the peak, the one that could free most first.

    Args:
        loss_bytes: how many bytes of the peak are of the loss.
        fused: how to lower these.
    """
    parts = peak.parts
    computed = max(parts[ACTIVATIONS] + parts[TRANSIENTS] - loss_bytes, 0)
    weights = parts[PARAMETERS] + parts[GRADIENTS]
    found = [
        (computed, f"gradient checkpointing ({readable(computed)} are activations, which it computes again)"),
        (loss_bytes, fused),
        (
            weights,
            f"LoRA or quantised weights ({readable(weights)} are parameters and gradients, which a sketch does not "
            "reduce; it helps more with a larger batch)",
        ),
    ]
    worth = [(size, text) for size, text in found if size >= _WORTH * peak.total]
    return tuple(text for _, text in sorted(worth, key=lambda each: -each[0]))

"""What optimisers keep: the bytes of their states, by formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """An optimiser's name, what it keeps in words, and the bytes of that for parameters: (count, bytes) -> bytes."""

    name: str
    words: str
    size: Callable[[int, int], int]


OPTIMIZERS = {
    "adamw": OptimizerStates("AdamW", "two states as large as the parameters", lambda count, size: 2 * size),
    "adamw8bit": OptimizerStates(
        "8-bit AdamW",
        "two states of one byte a parameter, and one fp32 scale for each 256 of them",
        lambda count, size: 2 * (count + 4 * -(-count // 256)),
    ),
    "sgd": OptimizerStates("SGD", "no states, without momentum", lambda count, size: 0),
}

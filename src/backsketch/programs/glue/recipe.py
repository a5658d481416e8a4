"""Recipe: the paper's way to fine-tune on GLUE, which is Fairseq's."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real

from .tasks import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """AdamW with a linear warm-up and a polynomial decay to zero; no clipping of gradients.

    Attributes:
        warmup: the share of all steps in which the learning rate grows.
        power: exponent of the decay; 1 is linear.
        clip: the norm at which gradients are clipped; 0 does not clip.
        max_length: tokens of a sentence or pair, the rest cut off.
    """

    batch_size: int = 16
    learning_rate: float = 1e-5
    epochs: int = 10
    warmup: float = 0.06
    power: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-6
    weight_decay: float = 0.1
    clip: float = 0.0
    max_length: int = 512

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "max_length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name, least, below in _RANGES:
            value = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not least <= value < below:
                raise ValueError(f"{name} must be at least {least} and below {below:g}, got {value!r}")
        if self.learning_rate == 0:
            raise ValueError("learning_rate must be above 0, got 0")

    def steps(self, examples: int) -> int:
        """Return how many steps the epochs have."""
        return self.epochs * math.ceil(examples / self.batch_size)

    def mean_batch(self, examples: int) -> float:
        """Return the mean number of examples in a step; the last step of an epoch may have fewer."""
        return examples / math.ceil(examples / self.batch_size)


_RANGES = (
    ("learning_rate", 0, math.inf),
    ("warmup", 0, 1),
    ("power", 0, math.inf),
    ("beta1", 0, 1),
    ("beta2", 0, 1),
    ("epsilon", 0, math.inf),
    ("weight_decay", 0, math.inf),
    ("clip", 0, math.inf),
)


def recipe_for(task: Task, **changes: float | int | None) -> Recipe:
    """Return the paper's recipe for a task with these changes; None changes nothing."""
    known = {field.name for field in fields(Recipe)}
    unknown = changes.keys() - known
    if unknown:
        raise ValueError(f"a recipe has {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
    paper = Recipe(batch_size=task.batch_size, learning_rate=task.learning_rate)
    return replace(paper, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]

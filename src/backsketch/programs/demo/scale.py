"""Scale: how large the demo is, and how long it trains."""

from __future__ import annotations

from dataclasses import dataclass

from .model import Size


@dataclass(frozen=True, slots=True)
class Scale:
    """The model, its batches, and the steps of a run.

    Attributes:
        steps: how many steps every contender trains.
        learning_rate: the largest; the rate rises over the first tenth of the steps and then falls linearly.
        looks: how often all contenders are validated, including at the end.
        validation_batches: how many batches each look takes.
        noise_looks: at how many of the looks, counted from the end, the noise is measured.
    """

    size: Size
    batch: int
    steps: int
    learning_rate: float
    looks: int
    validation_batches: int
    noise_looks: int

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup = max(1, self.steps // 10)
        return self.learning_rate * min((step + 1) / warmup, (self.steps - step) / (self.steps - warmup + 1), 1.0)

    def look_steps(self) -> list[int]:
        """Return the numbers of finished steps after which all are validated."""
        return sorted({round(self.steps * (look + 1) / self.looks) for look in range(self.looks)} - {0})

    def noise_steps(self) -> list[int]:
        """Return the looks at which the noise is measured."""
        return self.look_steps()[-self.noise_looks :]


FULL = Scale(
    size=Size(hidden=768, heads=12, layers=2, length=128),
    batch=8,
    steps=64,
    learning_rate=2e-3,
    looks=8,
    validation_batches=4,
    noise_looks=3,
)
QUICK = Scale(
    size=Size(hidden=768, heads=12, layers=1, length=128),
    batch=8,
    steps=18,
    learning_rate=2e-3,
    looks=3,
    validation_batches=2,
    noise_looks=1,
)

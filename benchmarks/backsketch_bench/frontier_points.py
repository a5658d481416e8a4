"""A setting as a point: bytes kept relative to fp32, added noise relative to SGD's own, relative step time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backsketch import noise, sketch_, valid_rows
from backsketch.linear.keeping import kept_bytes

from .activations import Activation
from .frontier_choices import PAPER, Choice
from .paper import paper_
from .progress import track
from .timing import best_times


@dataclass(frozen=True, slots=True)
class Point:
    """One setting, measured; ``noise`` is D² / D²_SGD averaged over layers, ``least`` and ``most`` its range.

    ``time`` is the time of a layer's step, forward and backward, relative to nn.Linear; None if not measured.
    """

    choice: Choice
    bytes: float
    noise: float
    least: float
    most: float
    time: float | None = None

    def as_record(self) -> dict[str, Any]:
        """Return the point for a JSON record."""
        config = {name: value for name, value in asdict(self.choice.config).items() if value is not None}
        numbers = {name: getattr(self, name) for name in ("bytes", "noise", "least", "most", "time")}
        rounded = {name: None if value is None else float(f"{value:.5g}") for name, value in numbers.items()}
        return {"family": self.choice.family, "config": config, "masked": self.choice.masked, **rounded}


def measure(
    layers: Sequence[Activation], choices: Sequence[Choice], times: Mapping[str, float] | None = None
) -> list[Point]:
    """Return a point for every choice from the layers' real inputs and gradients."""
    times = {} if times is None else times
    doubled = [Activation(layer.name, layer.x.double(), layer.y.double(), layer.valid) for layer in layers]
    batch_noise = [noise.sgd_variance(layer.x, layer.y) for layer in doubled]
    points = []
    for choice in track(choices, "noise", len(choices)):
        ratios = torch.stack(
            [
                noise.sketch_variance(layer.x, layer.y, choice.config, layer.valid if choice.masked else None) / own
                for layer, own in zip(doubled, batch_noise, strict=True)
            ]
        )
        numbers = (float(ratios.mean()), float(ratios.min()), float(ratios.max()))
        points.append(Point(choice, kept_share(layers, choice), *numbers, times.get(str(choice))))
    return points


def kept_share(layers: Sequence[Activation], choice: Choice) -> float:
    """Return what is kept of the layers' inputs, relative to their fp32 bytes."""
    shapes = [(layer.x.shape[:-1].numel(), layer.x.shape[-1]) for layer in layers]
    kept = sum(kept_bytes(choice.config, rows, features, 4) for rows, features in shapes)
    return kept / sum(rows * features * 4 for rows, features in shapes)


def step_times(layers: Sequence[Activation], choices: Sequence[Choice], *, rounds: int) -> dict[str, float]:
    """Return the step time of the model's largest layer with each choice, relative to nn.Linear."""
    layer = main_layer(layers)
    steps = {str(choice): _step(layer, choice) for choice in choices}
    best = best_times({"exact": _step(layer, None), **steps}, rounds=rounds, title="step time")
    return {name: best[name] / best["exact"] for name in steps}


def main_layer(layers: Sequence[Activation]) -> Activation:
    """Return the first of the layers with the largest weight."""
    return max(layers, key=lambda layer: layer.x.shape[-1] * layer.y.shape[-1])


def _step(layer: Activation, choice: Choice | None) -> Callable[[], object]:
    module = nn.Linear(layer.x.shape[-1], layer.y.shape[-1])
    if choice is not None and choice.family == PAPER:
        paper_(module, choice.config.ratio or 1.0)
    elif choice is not None:
        sketch_(module, choice.config)
    valid = layer.valid if choice is not None and choice.masked else None
    x = layer.x.detach().clone().requires_grad_()
    wanted = (x, *module.parameters())

    def step() -> tuple[Tensor, ...]:
        with nullcontext() if valid is None else valid_rows(valid):
            out = module(x)
        return torch.autograd.grad(out, wanted, layer.y)

    return step

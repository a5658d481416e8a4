"""A setting as a point: bytes kept of the input's own, added noise relative to SGD's own, relative step time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backsketch import sketch_, valid_rows
from backsketch.linear.keeping import kept_bytes

from .activations import Activation
from .frontier_choices import PAPER, Choice, within
from .layer_noise import LayerNoise
from .paper import paper_
from .timing import best_times

CURVE = tuple(0.02 * 1.09**step for step in range(40))  # shares of the bytes, 2% to 58%


@dataclass(frozen=True, slots=True)
class Point:
    """One setting, measured; ``noise`` is D² / D²_SGD averaged over layers, ``least`` and ``most`` its range.

    ``worst`` names the layer that has ``most``. ``time`` is the time of a layer's step, forward and backward, relative
    to nn.Linear; None if not measured.
    """

    choice: Choice
    bytes: float
    noise: float
    least: float
    most: float
    worst: str
    time: float | None = None

    def as_record(self) -> dict[str, Any]:
        """Return the point for a JSON record."""
        config = {name: value for name, value in asdict(self.choice.config).items() if value is not None}
        numbers = {name: getattr(self, name) for name in ("bytes", "noise", "least", "most", "time")}
        rounded = {name: None if value is None else float(f"{value:.5g}") for name, value in numbers.items()}
        own = {"family": self.choice.family, "config": config, "masked": self.choice.masked}
        return {**own, **rounded, "worst": self.worst}


def measure(layers: Sequence[Activation], choices: Sequence[Choice]) -> list[Point]:
    """Return a point for every choice from the layers' real inputs and gradients."""
    return points_of(layers, [LayerNoise.of(layer) for layer in layers], choices)


def points_of(layers: Sequence[Activation], noises: Sequence[LayerNoise], choices: Sequence[Choice]) -> list[Point]:
    """Return a point for every choice; ``noises`` belong to ``layers``, one to one."""
    points = []
    for choice in choices:
        found = {each.name: each.relative(choice) for each in noises}
        worst = max(found, key=lambda name: found[name])
        numbers = (sum(found.values()) / len(found), min(found.values()), found[worst])
        points.append(Point(choice, kept_share(layers, choice), *numbers, worst))
    return points


def best_curve(layers: Sequence[Activation], noises: Sequence[LayerNoise]) -> list[Point]:
    """Return the rotated setting with the least noise at each share of ``CURVE``, padding kept and then left out."""
    itemsize, padded = layers[0].x.element_size(), is_padded(layers)
    best = []
    for masked in (False, True) if padded else (False,):
        for share in CURVE:
            choices = [each for each in within(share, itemsize, padded=padded) if each.masked is masked]
            found = points_of(layers, noises, [each for each in choices if each.config.rotate])
            best.append(min(found, key=lambda point: point.noise))
    return best


def is_padded(layers: Sequence[Activation]) -> bool:
    """Tell whether any row is padding."""
    return any(layer.valid is not None and not bool(layer.valid.all()) for layer in layers)


def kept_share(layers: Sequence[Activation], choice: Choice) -> float:
    """Return what is kept of the layers' inputs, relative to their own bytes."""
    shapes = [(layer.x.shape[:-1].numel(), layer.x.shape[-1], layer.x.element_size()) for layer in layers]
    return sum(kept_bytes(choice.config, *shape) for shape in shapes) / sum(layer.x.nbytes for layer in layers)


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
    module = nn.Linear(layer.x.shape[-1], layer.y.shape[-1], dtype=layer.x.dtype)
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

"""What the speed benchmark runs: steps of one layer, of a whole model and of the sketch itself, and their bytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from backsketch import SketchConfig, peak_memory, saved_memory
from backsketch.linear.keeping import keep
from backsketch.linear.weight_gradient import weight_gradient
from backsketch.seeds import draw_seed

from .contenders import Contender


def converted(way: Contender, layer: nn.Module) -> nn.Module:
    """Return a converted copy of a layer."""
    own = copy.deepcopy(layer)
    way.convert(own)
    return own


def layer_step(way: Contender, layer: nn.Linear, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return forward and backward of a converted copy of a layer.

    An operation makes its input, as in a network: a layer takes more care of memory that NumPy may share.
    """
    own, made = converted(way, layer), x * 1
    wanted = ([made] if x.requires_grad else []) + [*own.parameters()]

    def step() -> None:
        with way.context():
            out = own(made)
        torch.autograd.grad(out, wanted, y)

    return step


def layer_bytes(way: Contender, layer: nn.Linear, x: Tensor) -> int:
    """Return what a layer keeps for backward."""
    own = converted(way, layer)
    with saved_memory(own) as saved, way.context():
        out = own(x)
    kept = saved.activations
    del out
    return kept


def layer_peak(way: Contender, layer: nn.Linear, x: Tensor, y: Tensor) -> int:
    """Return the peak of a layer's step."""
    step = layer_step(way, layer, x, y)
    with peak_memory() as peak:
        step()
    return peak.total


def model_step(way: Contender, model: nn.Module, inputs: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return forward and backward of ``model`` as it is when called: converted by ``way.applied``."""

    def step() -> None:
        with way.context():
            loss = model(**inputs).loss
        loss.backward()
        model.zero_grad(set_to_none=True)  # all ways share the model, and must not see gradients of another way

    return step


def model_bytes(way: Contender, model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return what a converted model keeps for backward, and the peak of its step."""
    step = model_step(way, model, inputs)
    with way.applied(model):
        with saved_memory(model) as saved, way.context():
            loss = model(**inputs).loss
        kept = saved.activations
        del loss
        with peak_memory(model) as peak:
            step()
    return kept, peak.total


def sketch_step(config: SketchConfig, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """Return the sketch itself: compress X, compress Y, multiply."""
    return lambda: weight_gradient(keep(x, config, draw_seed()), y, config, x.shape[1])


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the least-squares slope of log time over log rows."""
    logs = [(math.log(size), math.log(second)) for size, second in zip(sizes, seconds, strict=True)]
    x, y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    return sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)

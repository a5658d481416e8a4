"""SketchedConv1D: what SketchedLinear is, for transformers' Conv1D (GPT-2). Loaded only after transformers is."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..config import SketchConfig
from .algorithm import layer_linear
from .layer import refuse_script, trains
from .twin_registry import register_twin


@register_twin(Conv1D)
class SketchedConv1D(Conv1D):  # type: ignore[misc]
    """A Conv1D (a linear layer with a transposed weight) that keeps a sketch of its input while training."""

    config: SketchConfig

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and trains(self)):
            out: Tensor = super().forward(x)
            return out
        return layer_linear(x, self.weight.t(), self.bias, self.config, self)

    def __prepare_scriptable__(self) -> nn.Module:
        return refuse_script()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, config=({self.config}))"

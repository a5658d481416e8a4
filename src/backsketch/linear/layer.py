"""SketchedLinear: an nn.Linear that trains from a sketch of its input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import SketchConfig, check_config
from ..torch_private import own_parameters, transforms_active
from .algorithm import layer_linear
from .twin_registry import register_twin


@register_twin(nn.Linear)
class SketchedLinear(nn.Linear):
    """An nn.Linear that keeps a sketch of its input for backward while training, and is nn.Linear in eval()."""

    config: SketchConfig

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: SketchConfig,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.config = check_config(config)

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and trains(self)):
            return F.linear(input, self.weight, self.bias)
        return layer_linear(input, self.weight, self.bias, self.config, self)

    def __prepare_scriptable__(self) -> nn.Module:
        return refuse_script()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, config=({self.config})"


def refuse_script() -> nn.Module:
    """Raise, because torch.jit.script cannot compile a sketched layer, nor a model with ``rest``."""
    raise RuntimeError(
        "torch.jit.script cannot compile a sketched model: call backsketch.unsketch_(model) first, or use torch.compile"
    )


def trains(layer: nn.Module) -> bool:
    """Tell whether a layer may have anything to train. Checkpointing needs the same answer with and without gradients.

    ``weight.requires_grad`` is not enough: a parametrized weight is computed from other parameters. Inside a torch.func
    transform the answer is always True, and sketched_linear decides.
    """
    return (
        bool(layer.weight.requires_grad)
        or transforms_active()
        or any(parameter.requires_grad for parameter in own_parameters(layer))
    )

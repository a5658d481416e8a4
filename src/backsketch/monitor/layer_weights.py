"""The parameters of which the weight of a layer is made."""

from __future__ import annotations

from torch import Tensor, nn

from ..torch_private import own_parameters


def weights_of(layer: nn.Module) -> list[Tensor]:
    """Return the weight of a linear layer; of a parametrized one the parameters it is computed from."""
    if own := [parameter for parameter in own_parameters(layer) if parameter.dim() > 1]:
        return own
    return [parameter for name, parameter in layer.named_parameters() if name != "bias"]

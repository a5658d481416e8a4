"""Why a module is not sketched, or a weight is out of reach of every sketch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from .conversion import left_exact_because
from .layer_classes import sketched_type
from .left_exact import FROZEN

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_OWN_PRODUCTS = "it multiplies its own weights, without linear layers"


def why_exact(module: nn.Module) -> str | None:
    """Say why a linear layer is not sketched; None for a module that is not linear at all."""
    kind = type(module).__name__
    if sketched_type(module) is not None:
        return (left_exact_because(module) or "no sketch_ in force") if weight_trains(module) else FROZEN
    if hasattr(module, "base_layer"):
        return None  # an adapter around layers that are listed on their own
    if isinstance(module, nn.MultiheadAttention):
        return _OWN_PRODUCTS
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight and never calls it"
    if isinstance(getattr(module, "weight", None), UninitializedParameter):
        return "not initialised yet: run one batch, then convert"
    reason = None
    if isinstance(module, nn.Linear) and parametrize.is_parametrized(module):
        reason = "parametrized: sketch it first, then parametrize it"
    elif isinstance(module, nn.Linear):
        reason = f"{kind} is a subclass of nn.Linear and may own its forward"
    elif ("Linear" in kind or "Conv1D" in kind) and hasattr(module, "weight"):
        reason = f"{kind} is not nn.Linear: it computes and stores in its own way"
    return reason if reason is None or weight_trains(module) else f"{reason}; frozen"


def why_unreached(module: nn.Module, parameter: Tensor, *, packed: bool = False) -> str:
    """Say why no sketch reaches a parameter of ``module``; ``packed`` tells that ``rest`` is on."""
    if (reason := why_exact(module)) is not None:
        return reason
    if isinstance(module, EMBEDDINGS):
        return "embedding: keeps only indices"
    if isinstance(module, _CONVOLUTIONS):
        return "convolution: no linear layer"
    if isinstance(module, nn.RNNBase):
        return _OWN_PRODUCTS
    what = f"a {parameter.dim()}-D parameter of {type(module).__name__}: "
    return what + ("rest keeps its input in few bits" if packed else "no linear layer; rest=True packs its input")


def weight_trains(module: nn.Module) -> bool:
    """Tell whether a layer's weight gets a gradient, also where it is computed from other parameters."""
    return bool(getattr(module.weight, "requires_grad", False))

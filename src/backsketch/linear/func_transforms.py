"""The torch.func transforms that a sketched layer supports: one level of grad or vjp, and nothing else."""

from __future__ import annotations

from torch import Tensor

from ..torch_private import is_wrapped, transform_levels, unwrapped


def check_forward(weight: Tensor) -> None:
    """Raise for transforms that would silently give a trained weight a wrong or zero gradient, or save nothing.

    The estimate of ∂W has no derivative of its own, so a second level of grad would be zero; rows that vmap hides from
    the layer cannot be sketched together; and forward mode keeps nothing, so there is nothing to sketch.
    """
    if _is_trained(weight):
        check_backward()


def check_backward() -> None:
    """Raise where backward itself is transformed, as jacrev does."""
    levels = transform_levels()
    if levels != ["grad"]:
        raise NotImplementedError(
            f"a sketched layer supports one level of torch.func.grad or vjp, got {' of '.join(levels)}; "
            "call backsketch.unsketch_(model) first, or model.eval()"
        )


def _is_trained(weight: Tensor) -> bool:
    """Tell whether any transform, or plain autograd outside them, needs the weight's gradient."""
    while not weight.requires_grad:
        if not is_wrapped(weight):
            return False
        weight = unwrapped(weight)
    return True

"""first_derivative_only: an operation that keeps few bits by itself refuses to be differentiated twice."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the backward of a Function raise with ``create_graph=True``.

    Torch's own ``once_differentiable`` raises only if the gradient that comes in can be differentiated. That of a sum
    cannot, and the second derivative would be zero without a word.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(_TWICE)
        return backward(ctx, *grads)

    return checked


_TWICE = (
    "a model whose whole step is kept in few bits cannot be differentiated twice (create_graph=True): it keeps the "
    "derivatives of its operations, and nothing to differentiate them by. Call backsketch.unsketch_(model), or "
    "backsketch.sketch_(model) without rest"
)

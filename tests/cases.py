"""The cases every law runs over: each kind in SKETCHES, full-size and blocked, and how to measure them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backsketch import SKETCHES, SketchConfig
from backsketch.torch_private import SHOWS_WHAT_IS_SAVED

BLOCK = 8
needs_shown_saves = pytest.mark.skipif(not SHOWS_WHAT_IS_SAVED, reason="torch shows what is saved since 2.8")
KINDS = sorted(SKETCHES)
FORMS = [(kind, block) for kind in KINDS for block in (None, BLOCK)]
RATIOS = [0.1, 0.5, 1.0]


def every_config(ratio: float | None = None, **others) -> list[SketchConfig]:
    return [SketchConfig(kind=kind, block=block, ratio=ratio, **others) for kind, block in FORMS]


def gradients(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, grad_out: Tensor
) -> tuple[Any, Any, Any, Any]:
    """Return output, ∂x, ∂W, ∂b of function(x, weight, bias)."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    out = function(x, weight, bias)
    out.backward(grad_out)
    return out.detach(), x.grad, weight.grad, None if bias is None else bias.grad


def saved_storages(run: Callable[[], object]) -> dict[int, int]:
    """Return address -> bytes of the storages that autograd saves while ``run`` runs and its result lives."""
    held = []

    def pack(tensor):
        held.append(tensor.detach() if tensor.grad_fn else tensor)  # an output would own the node that owns it
        return held[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    del result
    return storages


def within_five_standard_errors(samples: Tensor, expected: Tensor | float, rounding: float = 1e-6) -> bool:
    """Tell whether the mean over dim 0 is the expected value, up to five standard errors and rounding."""
    samples = samples.double()
    error = (samples.mean(0) - expected).abs()
    return bool((error <= 5 * samples.std(0) / len(samples) ** 0.5 + rounding).all())

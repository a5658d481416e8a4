"""The time of a step on this machine, in one way to train."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from ..convert.checkpointed_blocks import uncheckpoint_
from ..convert.conversion import unsketch_
from ..losses.fused_models import fuse_loss_
from ..memory.training_step import Loss, forward_to_loss, on_meta
from ..memory.untouched_model import untouched
from .batches import Inputs
from .ways import Way

ROUNDS = 3


def check_measurable(model: nn.Module) -> None:
    """Raise ValueError for a model that cannot run."""
    if on_meta(model):
        raise ValueError("measure=True needs a model with weights, got one on the meta device")


def step_seconds(
    model: nn.Module, inputs: Inputs, loss: Loss | None, way: Way, blocks: Sequence[str], *, fused: bool
) -> float | None:
    """Return the seconds of forward and backward, the best of some rounds after one; None if memory does not suffice.

    The model is left as it was.
    """
    args, kwargs = inputs
    with untouched(model, inputs):
        uncheckpoint_(unsketch_(model))
        if fused:
            fuse_loss_(model)
        way.apply(model, blocks)
        found = []
        try:
            for _ in range(1 + ROUNDS):
                start = time.perf_counter()
                forward_to_loss(model, args, kwargs, loss).backward()  # type: ignore[no-untyped-call]
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                found.append(time.perf_counter() - start)
                model.zero_grad(set_to_none=True)
        except torch.OutOfMemoryError:
            return None
    return min(found[1:])

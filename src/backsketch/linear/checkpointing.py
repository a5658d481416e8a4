"""Activation checkpointing: whether a layer runs inside it, in its first or its second pass."""

from __future__ import annotations

import warnings

from ..torch_private import in_backward, runs_for_selective_checkpoint, saves_for_checkpoint


def inside_checkpoint() -> bool:
    """Tell whether this forward is the first pass of a checkpointed region, or its repetition in backward.

    The first pass of reentrant checkpointing is not recognised: it looks like any other forward without gradients.
    """
    return in_backward() or saves_for_checkpoint() or runs_for_selective_checkpoint()


def warn_of_checkpoint() -> None:
    """Say once that a sketch inside a checkpointed region saves next to nothing."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "a sketched layer runs inside activation checkpointing, which keeps nothing of it between the passes: the "
            "sketch adds noise and saves memory only while that region is run again. backsketch.sketch_(model, "
            "checkpointed=False) leaves such layers exact; backsketch.summary(model) names them",
            RuntimeWarning,
            stacklevel=2,
        )


_warned = False

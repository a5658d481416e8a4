"""Activation checkpointing: whether a layer runs inside of it, in either of its two passes."""

from __future__ import annotations

import warnings

import torch
import torch.utils.checkpoint


def inside_checkpoint() -> bool:
    """Tell whether this forward belongs to a checkpointed region: its first pass, or its repetition in backward.

    The first pass of reentrant checkpointing runs without gradients and cannot be told from any other such forward.
    """
    return torch._C._current_graph_task_id() != -1 or _saves_for_checkpoint() or _runs_for_selective_checkpoint()


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


def _saves_for_checkpoint() -> bool:
    """Tell whether what is saved for backward now goes to non-reentrant checkpointing, by whose hooks take it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


def _runs_for_selective_checkpoint() -> bool:
    """Tell whether selective checkpointing watches operations, also where other hooks than its own save tensors."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = (torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack()))
    return any(type(mode).__module__ == torch.utils.checkpoint.__name__ for mode in modes)

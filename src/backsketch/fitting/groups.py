"""Groups of ways: a model as it is, with the fused loss, and with adapters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..convert.checkpointed_blocks import blocks_of
from ..losses.fused_models import fuse_loss_
from ..memory.training_step import Loss
from .batches import BatchMaker
from .fit_result import ADAPTERS, FUSED
from .subject import Subject
from .ways import EXACT, Way, ways_for


@dataclass(frozen=True)
class Group:
    """A subject, the ways to train it, and the lines of Python that make it of the model."""

    name: str
    subject: Subject
    ways: tuple[Way, ...]
    code: tuple[str, ...]


def groups_of(model: nn.Module, batches: BatchMaker, loss: Loss | None, lora: int | None) -> Iterator[Group]:
    """Yield the groups of a model on the meta device.

    A language model is compared with its own loss only as it is: the fused loss is exact and takes less.
    """
    for name, code, own in _variants(model, lora):
        blocks = blocks_of(own)
        every = tuple(ways_for(own, bool(blocks)))
        fused = _fused(own)
        plain = every if fused is None else (EXACT,)
        yield Group(name, Subject(own, blocks, batches, loss), plain, code)
        if fused is not None:
            words = f"{name}, {FUSED}" if name else FUSED
            yield Group(words, Subject(fused, blocks, batches, loss), every, (*code, "bs.fuse_loss_(model)"))


def _variants(model: nn.Module, lora: int | None) -> Iterator[tuple[str, tuple[str, ...], nn.Module]]:
    yield "", (), model
    if lora is not None:
        config = f'LoraConfig(r={lora}, target_modules="all-linear")'
        code = f"model = get_peft_model(model, {config}, autocast_adapter_dtype=False)"
        yield f"{ADAPTERS} of rank {lora}", (code,), _adapted(model, lora)


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("lora needs peft: pip install 'backsketch[peft]'") from error
    own: Any = copy.deepcopy(model)
    config = LoraConfig(r=rank, target_modules="all-linear")
    try:
        adapted: nn.Module = get_peft_model(own, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ValueError(
            f"lora must be None for a model without linear layers that peft adapts, got {rank}: {error}"
        ) from error
    return adapted.to("meta").train()


def _fused(model: nn.Module) -> nn.Module | None:
    """Return a copy whose loss is fused, or None if it is no language model."""
    fused = copy.deepcopy(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fuse_loss_(fused)
    except ValueError:
        return None
    return fused

"""What is compared: exact training, the paper's method, its alternatives, and ours. Each converts a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from backsketch import SketchConfig, sketch_, unsketch_
from backsketch.config import STORED_BITS

from .paper import paper_, unpaper_

RATIOS = (0.5, 0.2, 0.1)

Convert = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Contender:
    """One way to train: how to convert a model and convert it back, and the context of its forward pass."""

    family: str
    ratio: float
    convert: Convert = lambda model: model
    revert: Convert = lambda model: model
    context: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)
    title: str | None = None

    @property
    def name(self) -> str:
        if self.title is not None:
            return self.title
        return self.family if self.ratio == 1 else f"{self.family}, ratio {self.ratio}"

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Convert ``model`` in place while inside."""
        self.convert(model)
        try:
            yield
        finally:
            self.revert(model)


EXACT = Contender("exact", 1)


def ours(family: str, config: SketchConfig) -> Contender:
    """Return a contender that converts with ``config``."""
    return Contender(family, config.ratio or 1, partial(sketch_, config=config), unsketch_)


def papers(ratio: float) -> Contender:
    """Return the paper's method at a ratio."""
    return Contender("the paper's dense Gaussian", ratio, partial(paper_, ratio=ratio), unpaper_)


def recommended(dtype: torch.dtype) -> Contender:
    """Return what ``sketch_(model)`` does for inputs in this type."""
    config = SketchConfig.recommended(dtype=dtype)
    return replace(ours("recommended", config), title="recommended")


def layer_contenders(dtype: torch.dtype) -> list[Contender]:
    """List what a single layer is compared with: all ways to store rows."""
    rotated = {bits: SketchConfig(ratio=1.0, bits=bits, rotate=True) for bits in (4, 3)}
    return [
        EXACT,
        papers(0.1),
        ours("rows", SketchConfig(ratio=0.1)),
        recommended(dtype),
        *(ours(f"all rows, {bits} bits", SketchConfig(ratio=1.0, bits=bits)) for bits in STORED_BITS),
        *(ours(f"all rows, {bits} bits, rotated", config) for bits, config in rotated.items()),
    ]


def kind_contenders() -> list[Contender]:
    """List the paper's method and every kind of sketch, at several ratios."""
    blocked = ("gaussian", "rademacher", "hadamard", "cosine", "fourier")
    return [
        *(papers(ratio) for ratio in RATIOS),
        *(ours("rows", SketchConfig(ratio=ratio)) for ratio in RATIOS),
        *(ours("hash", SketchConfig(kind="hash", ratio=ratio)) for ratio in RATIOS),
        *(
            ours(f"{kind}, block 128", SketchConfig(kind=kind, ratio=ratio, block=128))
            for kind in blocked
            for ratio in RATIOS
        ),
    ]


def encoder_contenders(dtype: torch.dtype = torch.float32) -> list[Contender]:
    """List what a whole encoder is compared with."""
    return [
        EXACT,
        papers(0.1),
        CHECKPOINTING,
        Contender("offload (save_on_cpu)", 1, context=save_on_cpu),
        recommended(dtype),
        ours("all rows, 8 bits", SketchConfig(ratio=1.0, bits=8)),
        ours("all rows, 4 bits", SketchConfig(ratio=1.0, bits=4)),
        ours("rows", SketchConfig(ratio=0.5)),
        ours("rows", SketchConfig(ratio=0.1)),
    ]


def _checkpoint_(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _uncheckpoint_(model: Any) -> None:
    model.gradient_checkpointing_disable()
    if hasattr(model, "_require_grads_hook"):  # newer transformers add it when enabling, and leave it when disabling
        model.disable_input_require_grads()


CHECKPOINTING = Contender("checkpointing", 1, _checkpoint_, _uncheckpoint_)

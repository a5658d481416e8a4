"""The ways to train whose whole steps are compared."""

from __future__ import annotations

from functools import partial

from torch import nn

from backsketch import SketchConfig, sketch_, unsketch_

from .contenders import CHECKPOINTING, EXACT, Contender


def _nothing(name: str, module: nn.Module) -> bool:
    return False


LINEAR = Contender("linear sketches", 1, sketch_, unsketch_)
WHOLE = Contender("whole step", 1, partial(sketch_, rest=True), unsketch_)
WHOLE_PRECISE = Contender(
    "whole step, 8 bits",
    1,
    partial(sketch_, config=SketchConfig(ratio=1.0, bits=8, rotate=True), rest=8),
    unsketch_,
)
WHOLE_WITHOUT_SKETCHES = Contender("whole step, no sketch", 1, partial(sketch_, where=_nothing, rest=True), unsketch_)
FULL_WAYS = (EXACT, CHECKPOINTING, LINEAR, WHOLE, WHOLE_PRECISE, WHOLE_WITHOUT_SKETCHES)

LORA = Contender("LoRA", 1)
LORA_CHECKPOINTING = Contender("LoRA, checkpointing", 1, CHECKPOINTING.convert, CHECKPOINTING.revert)
LORA_WHOLE = Contender("LoRA, whole step", 1, WHOLE.convert, WHOLE.revert)
ADAPTER_WAYS = (LORA, LORA_CHECKPOINTING, LORA_WHOLE)

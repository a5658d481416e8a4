"""Ways: the ways to train a model whose steps are compared, each with the Python that switches it on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..config import ROUNDING_NOISE, SketchConfig
from ..convert.checkpointed_blocks import checkpoint_
from ..convert.conversion import no_layer, sketch_
from ..rest.rest_config import RestConfig
from ..torch_private import SHOWS_WHAT_IS_SAVED

NO_NOISE, AS_PRECISE = "none", "as bf16"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        name: in few words.
        checkpointed: which blocks are: ``none``, ``all``, or ``some``, the first ones, as many as are needed.
        convert: changes a model in place, after its blocks are checkpointed.
        noise: how much noise it adds to weight gradients, in words.
        code: lines of Python that switch it on, without the checkpointing of blocks.
    """

    name: str
    checkpointed: str
    convert: Callable[[nn.Module], object] | None
    noise: str
    code: tuple[str, ...]

    def apply(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Switch it on, with these blocks checkpointed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no layer is converted: the table shows it
            if blocks:
                checkpoint_(model, blocks)
            if self.convert is not None:
                self.convert(model)


NONE, SOME, ALL = "none", "some", "all"
EXACT = Way("exact", NONE, None, NO_NOISE, ())


def ways_for(model: nn.Module, has_blocks: bool) -> Iterator[Way]:
    """Yield the ways to train a model with the loss that it has."""
    yield EXACT
    if has_blocks:
        yield Way("checkpointing", ALL, None, NO_NOISE, ())
    linear = _linear_noise(model)
    if SHOWS_WHAT_IS_SAVED and has_blocks:
        packed = RestConfig(checkpoint=8)
        yield Way(
            "checkpointing, packed",
            ALL,
            lambda model: sketch_(model, where=no_layer, rest=packed),
            AS_PRECISE,
            ("bs.sketch_(model, where=lambda name, layer: False, rest=bs.RestConfig(checkpoint=8))",),
        )
    yield Way("linear sketches", NONE, sketch_, linear, ("bs.sketch_(model)",))
    if SHOWS_WHAT_IS_SAVED:
        more = f"{linear}+rest"
        yield Way("sketches and rest", NONE, _whole_step, more, ("bs.sketch_(model, rest=True)",))
        if has_blocks:
            code = ("bs.sketch_(model, rest=True, checkpointed=False)",)
            yield Way("sketches, rest, checkpointing", SOME, _whole_step_between, more, code)


def _whole_step(model: nn.Module) -> object:
    return sketch_(model, rest=True)


def _whole_step_between(model: nn.Module) -> object:
    return sketch_(model, rest=True, checkpointed=False)


def _linear_noise(model: nn.Module) -> str:
    """Return the noise that ``sketch_(model)`` adds, in units of the batch's own, by the formula of ``rows``."""
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    config = SketchConfig.recommended(dtype=dtype)
    assert config.ratio is not None
    assert config.bits is not None
    return f"{1 / config.ratio - 1 + ROUNDING_NOISE[config.bits, config.rotate] / config.ratio:.2g}"

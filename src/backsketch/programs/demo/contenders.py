"""What the demo compares: exact training, the paper's sketch, two of ours, the whole step, and checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch.utils.checkpoint import checkpoint

from ...config import SketchConfig
from ...convert.conversion import sketch_
from ...memory.profile_result import Profile
from ...torch_private import SHOWS_WHAT_IS_SAVED
from .model import ByteModel

EXACT, PAPER, ROWS, RECOMMENDED, WHOLE, CHECKPOINTING = (
    "exact", "paper", "rows", "recommended", "whole", "checkpointing"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train: its key in the record, its name for people, the sketch if it has one, and ``rest``."""

    key: str
    name: str
    config: SketchConfig | None = None
    rest: bool | None = None

    def convert(self, model: ByteModel, exact_profile: Profile) -> None:
        """Make ``model`` train this way, in place; layers for which ``exact_profile`` finds no gain stay exact."""
        if self.config is not None:
            sketch_(model, self.config, profile=exact_profile, rest=self.rest)
        elif self.key == CHECKPOINTING:
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)


_ALL = (
    Contender(EXACT, "exact"),
    Contender(PAPER, "paper's Gaussian", SketchConfig(kind="gaussian", ratio=0.1)),
    Contender(ROWS, "rows", SketchConfig(kind="rows", ratio=0.1)),
    Contender(RECOMMENDED, "recommended", SketchConfig.recommended(keep=0.1)),
    Contender(WHOLE, "whole step", SketchConfig.recommended(keep=0.1), rest=True),
    Contender(CHECKPOINTING, "checkpointing"),
)
CONTENDERS = tuple(each for each in _ALL if each.rest is None or SHOWS_WHAT_IS_SAVED)

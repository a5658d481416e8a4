"""The settings that the frontier compares: the paper's Gaussian, other kinds at several ratios, and few bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backsketch import SketchConfig
from backsketch.config import STORED_BITS
from backsketch.storage.sizes import row_share

PAPER = "paper"
RATIOS = (0.5, 0.3, 0.2, 0.1, 0.05)
PAPER_RATIOS = (0.9, *RATIOS)
STORED_RATIOS = (1.0, 0.7, 0.5, 0.2, 0.1)
BLOCKED_RATIO = 0.1
COMPARED_RATIOS = (1.0, 0.5)  # of settings that are there to see what rotation or centring changes
CENTERED_BITS = 3
BUDGETS = (0.2, 0.125, 0.1, 0.08, 0.05, 0.03)
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting: a family to draw it with, what is kept, and whether padded rows are left out."""

    family: str
    config: SketchConfig
    masked: bool = False

    def __str__(self) -> str:
        """Name the setting as a table row does."""
        return f"{self.config}{', mask' if self.masked else ''}"

    @property
    def short(self) -> str:
        """Name the setting in few characters: "rows 0.5, 4 bits, rotate, mask"."""
        config = self.config
        parts = [f"{config.kind} {config.ratio}", *([f"block {config.block}"] if config.block else [])]
        parts += [f"{config.bits} bits"] if config.bits else []
        parts += ["rotate"] * config.rotate + ["center"] * config.center
        parts += ["mask"] * self.masked + ["paper"] * (self.family == PAPER)
        return ", ".join(parts)


def grid(*, padded: bool) -> list[Choice]:
    """Return every point of the frontier; settings that leave padding out only where something is ``padded``."""
    paper = [Choice(PAPER, SketchConfig(kind="gaussian", ratio=ratio)) for ratio in PAPER_RATIOS]
    choices = [*paper, *_kinds(), *_stored()]
    return [choice for choice in choices if padded or not choice.masked]


def within(budget: float, itemsize: int, *, padded: bool) -> list[Choice]:
    """Return the settings of ``rows`` that keep just that share of their input's bytes, or all rows if they fit.

    Args:
        itemsize: bytes of one value of the input.
    """
    return [
        Choice(_family(config, masked), config, masked)
        for bits in STORED_BITS
        for rotate in (False, True)
        for masked in ((False, True) if padded else (False,))
        for config in [SketchConfig(ratio=min(1.0, budget / row_share(bits, itemsize)), bits=bits, rotate=rotate)]
    ]


def _kinds() -> Iterator[Choice]:
    for kind in ("rows", "hash"):
        for ratio in RATIOS:
            yield Choice(kind, SketchConfig(kind=kind, ratio=ratio))
    for kind in ("gaussian", "hadamard"):
        yield Choice(kind, SketchConfig(kind=kind, ratio=BLOCKED_RATIO, block=BLOCK))
    for ratio in RATIOS:
        yield Choice("rows mask", SketchConfig(ratio=ratio), masked=True)


def _stored() -> Iterator[Choice]:
    for bits in STORED_BITS:
        rotated = [SketchConfig(ratio=ratio, bits=bits, rotate=True) for ratio in STORED_RATIOS]
        plain = [SketchConfig(ratio=ratio, bits=bits) for ratio in COMPARED_RATIOS]
        yield from (Choice(_family(config, False), config) for config in (*rotated, *plain))
        yield from (Choice(_family(config, True), config, masked=True) for config in rotated)
    for ratio in COMPARED_RATIOS:
        config = SketchConfig(ratio=ratio, bits=CENTERED_BITS, rotate=True, center=True)
        yield Choice(_family(config, False), config)


def _family(config: SketchConfig, masked: bool) -> str:
    return f"{config.bits} bits{' rotated' * config.rotate}{' center' * config.center}{' mask' * masked}"

"""The settings that the frontier compares: the paper's Gaussian, other kinds at several ratios, and few bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backsketch import SketchConfig
from backsketch.config import STORED_BITS

PAPER = "paper"
RATIOS = (0.5, 0.3, 0.2, 0.1, 0.05)
PAPER_RATIOS = (0.9, *RATIOS)
STORED_RATIOS = (1.0, 0.85, 0.7, 0.5, 0.35, 0.2, 0.1)
CENTERED_RATIOS = (1.0, 0.5, 0.1)
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
        """Name the setting in few characters: "rows 0.5, 4 bits, mask"."""
        config = self.config
        parts = [f"{config.kind} {config.ratio}", *([f"block {config.block}"] if config.block else [])]
        parts += [f"{config.bits} bits"] if config.bits else []
        parts += ["center"] * config.center + ["mask"] * self.masked + ["paper"] * (self.family == PAPER)
        return ", ".join(parts)


def grid() -> list[Choice]:
    """Return every point of the frontier."""
    paper = [Choice(PAPER, SketchConfig(kind="gaussian", ratio=ratio)) for ratio in PAPER_RATIOS]
    return [*paper, *_kinds(), *_stored()]


def within(budget: float) -> list[Choice]:
    """Return the settings of ``rows`` that keep just that share of the fp32 bytes, or all rows if they fit."""
    return [
        Choice(_family(bits, False, masked), config, masked)
        for bits in STORED_BITS
        for masked in (False, True)
        for config in [SketchConfig(ratio=min(1.0, budget / row_share(bits)), bits=bits)]
    ]


def row_share(bits: int) -> float:
    """Return what a stored row takes of its fp32 bytes: the codes, and 8 bytes a group of 128 values."""
    return (bits + 0.5) / 32


def _kinds() -> Iterator[Choice]:
    for kind, block in (("rows", None), ("hash", None), ("gaussian", BLOCK), ("hadamard", BLOCK)):
        for ratio in RATIOS:
            yield Choice(kind, SketchConfig(kind=kind, ratio=ratio, block=block))
    for ratio in RATIOS:
        yield Choice("rows mask", SketchConfig(ratio=ratio), masked=True)
    for ratio in RATIOS:
        config = SketchConfig(kind="hadamard", ratio=ratio, block=BLOCK, center=True)
        yield Choice("hadamard center mask", config, masked=True)


def _stored() -> Iterator[Choice]:
    for bits in STORED_BITS:
        for center in (False, True):
            for masked in (False, True):
                for ratio in CENTERED_RATIOS if center else STORED_RATIOS:
                    config = SketchConfig(ratio=ratio, bits=bits, center=center)
                    yield Choice(_family(bits, center, masked), config, masked)


def _family(bits: int, center: bool, masked: bool) -> str:
    return f"{bits} bits{' center' * center}{' mask' * masked}"

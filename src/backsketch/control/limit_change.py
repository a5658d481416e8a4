"""LimitChange: what NoiseLimit did once, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import SketchConfig
from ..table import change


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChange:
    """A change of what layers keep.

    Attributes:
        step: after how many steps; reason: why.
        noise_before, noise_after: added noise / SGD's noise as expected of the old and of the new configs.
        bytes_before, bytes_after: what the layers keep at one time of a batch of mean size, on one process.
        configs: the layers that changed, and their new configs.
    """

    step: int
    reason: str
    noise_before: float
    noise_after: float
    bytes_before: int
    bytes_after: int
    configs: Mapping[str, SketchConfig]

    def __str__(self) -> str:
        noise = f"noise {self.noise_before:.3g} -> {self.noise_after:.3g}"
        kept = f"kept {change(self.bytes_before, self.bytes_after)}"
        return f"step {self.step}: {self.reason}; {noise}, {kept}; {len(self.configs)} layers changed"

"""Plan: a config for every layer, and what to expect of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..config import SketchConfig
from ..table import Table, change, readable, together


class PlannedConfigs(dict[str, SketchConfig | None]):
    """Layer name -> config, or None to leave it exact, as a plan chose them."""

    leaves_exact = "left exact by the plan"


class PlanError(ValueError):
    """There is no plan for this model, batch and budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayers:
    """Layers that share an input, their planned config (None: exact), their bytes before and after, and the noise."""

    layers: tuple[str, ...]
    config: SketchConfig | None
    bytes_before: int
    bytes_after: int
    noise: float


@dataclass(frozen=True, eq=False)
class Plan(Mapping[str, SketchConfig | None]):
    """Layer name -> config, or None to leave it exact; ``sketch_`` takes it as it is. Print it to see what to expect.

    Attributes:
        configs: the mapping itself; parts: the same by sets of layers that share an input.
        budget: bytes that linear inputs may keep.
        kept_before, kept_after: all bytes kept for backward, without parameters.
    """

    leaves_exact: ClassVar[str] = PlannedConfigs.leaves_exact

    configs: Mapping[str, SketchConfig | None]
    parts: tuple[PlannedLayers, ...]
    budget: int
    kept_before: int
    kept_after: int

    @property
    def bytes_before(self) -> int:
        """Return what linear inputs keep today, without those that another operation holds anyway."""
        return sum(part.bytes_before for part in self.parts)

    @property
    def bytes_after(self) -> int:
        """Return what linear inputs keep under the plan."""
        return sum(part.bytes_after for part in self.parts)

    @property
    def noise(self) -> float:
        """Return D² under the plan: the expected squared error of all weight gradients together."""
        return sum(part.noise for part in self.parts)

    def __getitem__(self, name: str) -> SketchConfig | None:
        return self.configs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.configs)

    def __len__(self) -> int:
        return len(self.configs)

    def layer_table(self, heads: tuple[str, ...] = ()) -> Table:
        """Return a row for each set of layers that share an input: its bytes today and planned, noise and config."""
        titles = ("layers", "today", "planned", "noise", "config")
        rows = tuple(
            (
                together(part.layers),
                readable(part.bytes_before),
                readable(part.bytes_after),
                f"{part.noise:.3g}",
                str(part.config) if part.config else "exact",
            )
            for part in self.parts
        )
        return Table(titles, rows, numeric=frozenset({1, 2, 3}), heads=heads)

    def __str__(self) -> str:
        linear = change(self.bytes_before, self.bytes_after)
        heads = (
            f"linear inputs: {linear}, within the budget of {readable(self.budget)}",
            f"all kept for backward: {change(self.kept_before, self.kept_after)}",
            f"expected noise of the weight gradients: {self.noise:.3g}",
        )
        return str(self.layer_table(heads))

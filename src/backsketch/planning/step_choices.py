"""StepChoices: what may be chosen for a whole step, with bytes and noise, and the least noise for a number of bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from ..config import SketchConfig
from ..convert.left_exact import weight_of
from ..rest.rest_config import FAMILIES, RestConfig
from .layer_noise import CallNoise
from .model_setting import ModelSetting
from .spending import Point, lower_hull, spend

EXACT = SketchConfig(ratio=1.0)  # keeps the input as it is, also where everything else is packed

Bits = int | None


@dataclass(frozen=True, eq=False)
class Family:
    """A family of operations: bits -> bytes and noise, None for as it is."""

    name: str
    bytes: Mapping[Bits, int]
    noise: Mapping[Bits, float]

    def points(self, share: float) -> list[Point[Any]]:
        """List its choices if only a share of its operations is outside of checkpoints."""
        return [Point(bits, round(share * size), share * self.noise[bits]) for bits, size in self.bytes.items()]


@dataclass(frozen=True, eq=False)
class LinearPart:
    """Layers that share an input, their choices, and the noise of their calls by layer."""

    layers: tuple[str, ...]
    points: Sequence[Point[SketchConfig | None]]
    calls: Mapping[str, Sequence[CallNoise]]

    def noise_under(self, configs: Mapping[str, SketchConfig]) -> float:
        """Return the noise if each layer has the config in ``configs``, or none."""
        return sum(call.under(configs[name]) for name in self.layers if name in configs for call in self.calls[name])


@dataclass(frozen=True, eq=False)
class Choice:
    """One choice for the whole step: its setting, the bytes it costs beyond the cheapest, and what it is made of."""

    setting: ModelSetting
    bytes: int = 0
    parts: tuple[tuple[LinearPart, Point[SketchConfig | None]], ...] = ()
    families: Mapping[str, float] = field(default_factory=dict)  # their noise

    @property
    def noise(self) -> float:
        """Return the expected squared error of the gradient."""
        return sum(point.noise for _, point in self.parts) + sum(self.families.values())


@dataclass(frozen=True, eq=False)
class Found:
    """A choice and its measured total."""

    choice: Choice
    total: float


@dataclass(frozen=True, eq=False)
class StepChoices:
    """What may be chosen outside of checkpointed blocks.

    Attributes:
        masks_pay: whether packing masks alone, which is exact, lowers what is kept.
        share: which share of the step is outside of checkpointed blocks, by bytes.
    """

    parts: tuple[LinearPart, ...]
    families: tuple[Family, ...]
    masks_pay: bool
    blocks: tuple[str, ...] = ()
    share: float = 1.0
    checkpoint: Bits = None

    @cached_property
    def hulls(self) -> list[list[Point[Any]]]:
        """Return the choices of each part and family that are worth their bytes."""
        items = [part.points for part in self.parts] + [family.points(self.share) for family in self.families]
        return [lower_hull(points) for points in items]

    @property
    def most(self) -> int:
        """Return the bytes of the quietest choice, beyond the cheapest."""
        return sum(hull[-1].bytes for hull in self.hulls) - self.least

    @property
    def least(self) -> int:
        """Return the bytes of the cheapest choice."""
        return sum(hull[0].bytes for hull in self.hulls)

    def with_bytes(self, budget: int) -> Choice:
        """Return the choice of least noise that costs at most ``budget`` bytes beyond the cheapest.

        The steps of a family are large. One that does not fit any more may yet be worth more than smaller ones that
        were taken before it, so each point of each family is tried with the others spent anew.
        """
        size = self.least + max(0, budget)
        best = spend(self.hulls, size)
        for place in range(len(self.parts), len(self.hulls)):
            for point in self.hulls[place]:
                fixed = [*self.hulls[:place], [point], *self.hulls[place + 1 :]]
                if sum(hull[0].bytes for hull in fixed) <= size:
                    best = min(best, spend(fixed, size), key=_noise)
        return self._choice(best)

    def with_noise(self, limit: float) -> Choice | None:
        """Return the choice of fewest bytes with at most so much noise, or None if even the quietest has more."""
        if sum(hull[-1].noise for hull in self.hulls) > limit:
            return None
        low, high = -1, self.most
        while high - low > max(1, self.most >> 12):
            middle = (low + high) // 2
            enough = _noise(spend(self.hulls, self.least + middle)) <= limit
            low, high = (low, middle) if enough else (middle, high)
        return self.with_bytes(high)

    def noise_of(self, configs: Mapping[str, SketchConfig], rest: RestConfig | None) -> float:
        """Return the noise of any setting outside of checkpointed blocks, on the same scale.

        A layer that is not sketched is rounded where ``rest`` rounds the inputs of linear layers.
        """
        if rest is not None and rest.product is not None:
            product = SketchConfig(ratio=1.0, bits=rest.product, rotate=True)
            configs = {name: configs.get(name, product) for part in self.parts for name in part.layers}
        noise = sum(part.noise_under(configs) for part in self.parts)
        if rest is None:
            return noise
        return noise + self.share * sum(_noise_at(family, getattr(rest, family.name)) for family in self.families)

    def recommended_noise(self, model: nn.Module) -> float:
        """Return the noise of ``sketch_(model, rest=True)``, the setting that we recommend."""
        names = [name for part in self.parts for name in part.layers]
        configs = {name: SketchConfig.recommended(dtype=weight_of(model.get_submodule(name)).dtype) for name in names}
        return self.noise_of(configs, RestConfig.recommended() if self.families or self.masks_pay else None)

    def _choice(self, points: Sequence[Point[Any]]) -> Choice:
        of_parts, of_families = points[: len(self.parts)], points[len(self.parts) :]
        bits: dict[str, Any] = dict.fromkeys(FAMILIES)
        bits |= {family.name: point.choice for family, point in zip(self.families, of_families, strict=True)}
        packs = any(each is not None for each in bits.values()) or self.masks_pay or self.checkpoint is not None
        rest = RestConfig(**bits, checkpoint=self.checkpoint) if packs else None
        exact = None if bits["product"] is None else EXACT
        chosen = {
            name: point.choice or exact
            for part, point in zip(self.parts, of_parts, strict=True)
            for name in part.layers
        }
        configs = {name: config for name, config in chosen.items() if config is not None}
        return Choice(
            ModelSetting(configs, rest, self.blocks),
            sum(point.bytes for point in points) - self.least,
            tuple(zip(self.parts, of_parts, strict=True)),
            {family.name: point.noise for family, point in zip(self.families, of_families, strict=True)},
        )


def _noise(points: Sequence[Point[Any]]) -> float:
    return sum(point.noise for point in points)


def _noise_at(family: Family, bits: Bits) -> float:
    """Return a family's noise at any number of bits, by the square of a step from those that were measured."""
    if bits in family.noise:
        return family.noise[bits]
    known: Collection[int] = [each for each in family.noise if each is not None]
    nearest = min(known, key=lambda each: abs(each - (bits or 0)))
    return family.noise[nearest] * float((2**nearest - 1) / (2 ** (bits or 0) - 1)) ** 2

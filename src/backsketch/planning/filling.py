"""Filling: spend what whole families leave of a limit on single modules and layers, whose steps are smaller."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..rest.rest_config import RestConfig
from ..table import starred
from .step_choices import EXACT, Choice, Found, StepChoices
from .step_meter import StepMeter

_ENOUGH = 0.01  # of the limit: what may stay free
_NEAR = 0.02  # of the limit: what a plan should not leave free
_MOST_TRIES = 16
_FREE_TRIES = 6  # of them, for steps that keep more than is left and do not fit


@dataclass(frozen=True, eq=False)
class _Step:
    """A choice with less noise in one place, by how much, and how many bytes more it keeps.

    ``name`` tells the place and what is chosen there.
    """

    name: tuple[Any, ...]
    choice: Choice
    gain: float
    price: float


@dataclass(frozen=True, eq=False)
class Filling:
    """What may be chosen while something is left of a limit.

    Attributes:
        modules: the names of those that can keep a family in other bits than the whole model.
    """

    choices: StepChoices
    modules: Sequence[str]
    meter: StepMeter
    limit: int

    def filled(self, found: Found) -> Found:
        """Return a choice of less noise, nearer to the limit, or ``found`` where no step fits.

        A step gives a family of one module more bits, or moves layers that share an input to a choice of less noise.
        The one that removes most noise per byte is measured first. One that did not fit is not tried again. In the end
        a few steps that keep more than is left are measured: where the peak is elsewhere, they are free. Some lower the
        total; of the choices on the way, the quietest near the limit is returned, if one is near.
        """
        refused: set[tuple[Any, ...]] = set()
        prices: dict[tuple[Any, ...], float] = {}  # blocks that only their numbers tell apart have one price
        free_tries = _FREE_TRIES if self.meter.total == "peak" else 0
        near: Found | None = None
        for _ in range(_MOST_TRIES):
            left = int(self.limit - found.total)
            near = found if left <= _NEAR * self.limit else near
            if not found.choice.noise:
                break
            steps = list(self._steps(found.choice, left, prices, refused)) if left > _ENOUGH * self.limit else []
            fitting = [each for each in steps if 0 < each.price <= left]
            if fitting:
                step = max(fitting, key=lambda each: each.gain / each.price)
            elif free_tries and (steps := list(self._steps(found.choice, self.limit, prices, refused))):
                step = max(steps, key=lambda each: each.gain)
            else:
                break
            total = self.meter(step.choice.setting)
            if total <= self.limit:
                found = Found(step.choice, total)
            else:
                refused.add(step.name)
                free_tries -= not fitting
        return found if near is None or self.limit - found.total <= _NEAR * self.limit else near

    def _steps(
        self, choice: Choice, left: int, prices: dict[tuple[Any, ...], float], refused: Collection[tuple[Any, ...]]
    ) -> Iterator[_Step]:
        """Yield the steps to less noise; layers move as far as ``left`` bytes allow."""
        for step in (*self._of_modules(choice, prices), *_of_parts(choice, left)):
            if step.gain > 0 and step.name not in refused:
                yield step

    def _of_modules(self, choice: Choice, prices: dict[tuple[Any, ...], float]) -> Iterator[_Step]:
        """Yield each family of each module with more bits, with the share of its noise that the growth stands for."""
        setting, kept = choice.setting, self.meter.kept(choice.setting)
        if setting.rest is None:
            return
        for module in self.modules:
            for family in self.choices.families:
                now = getattr(_rest_in(module, setting.module_rests, setting.rest), family.name)
                for bits, noise in family.noise.items():
                    if noise >= family.noise[now]:
                        continue
                    rests = _with_bits(module, family.name, bits, setting.module_rests, setting.rest)
                    changed = replace(setting, module_rests=rests)
                    kind = (starred(module), family.name, now, bits)
                    if kind not in prices:
                        prices[kind] = self.meter.kept(changed) - kept
                    grown = self.choices.share * (family.bytes[bits] - family.bytes[now])
                    share = self.choices.share * prices[kind] / grown if grown > 0 else 0.0
                    gain = min(share * (family.noise[now] - noise), choice.families[family.name])
                    families = {**choice.families, family.name: choice.families[family.name] - gain}
                    size = choice.bytes + int(prices[kind])
                    larger = replace(choice, setting=changed, bytes=size, families=families)
                    yield _Step((module, *kind[1:]), larger, gain, prices[kind])


def _of_parts(choice: Choice, left: int) -> Iterator[_Step]:
    """Yield each part with the choice of least noise that costs at most ``left`` bytes more."""
    setting = choice.setting
    packs = setting.rest is not None and setting.rest.product is not None
    for place, (part, now) in enumerate(choice.parts):
        point = min((each for each in part.points if each.bytes <= now.bytes + left), key=lambda each: each.noise)
        config = point.choice or (EXACT if packs else None)
        configs = {name: own for name, own in setting.configs.items() if name not in part.layers}
        if config is not None:
            configs |= dict.fromkeys(part.layers, config)
        parts = (*choice.parts[:place], (part, point), *choice.parts[place + 1 :])
        price = point.bytes - now.bytes
        changed = replace(choice, setting=replace(setting, configs=configs), bytes=choice.bytes + price, parts=parts)
        yield _Step((part.layers, point.choice), changed, now.noise - point.noise, price)


def _rest_in(module: str, rests: Mapping[str, RestConfig], rest: RestConfig) -> RestConfig:
    """Return what holds in a module: its own config, or that of the innermost module around it that has one."""
    around = [name for name in rests if f"{module}.".startswith(f"{name}.")]
    return rests[max(around, key=len)] if around else rest


def _with_bits(
    module: str, family: str, bits: int | None, rests: Mapping[str, RestConfig], rest: RestConfig
) -> dict[str, RestConfig]:
    """Return the configs of modules with other bits for a family in one of them; outer modules come first."""
    changed: dict[str, Any] = {family: bits}
    inside = {name: own for name, own in rests.items() if name.startswith(f"{module}.")}
    own = {module: _rest_in(module, rests, rest), **inside}
    return dict(sorted({**rests, **{name: replace(each, **changed) for name, each in own.items()}}.items()))

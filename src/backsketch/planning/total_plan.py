"""TotalPlan: what to keep of a whole step, for a limit of everything kept or of the peak."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..config import SketchConfig
from ..rest.rest_config import FAMILIES, RestConfig
from ..table import change, readable, together
from .plan_result import Plan, PlannedLayers

_NAMES = {"kept": "all kept for backward", "peak": "peak of a step"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NearbyPlan:
    """What another plan would have: the bytes of its total, its noise, how many blocks it checkpoints, and its rest."""

    after: int
    noise: float
    blocks: int
    rest: RestConfig | None


@dataclass(frozen=True, eq=False, kw_only=True)
class TotalPlan(Plan):
    """A plan of a whole step. ``sketch_`` applies all of it; print it to see what to expect.

    Attributes:
        total: what has a limit, "kept" or "peak"; limit: its bytes.
        before, after: the total of the exact model, None if that does not fit into memory, and under the plan.
        rest: in how many bits everything else is kept; module_rests: the same for modules that have other bits.
        blocks: those that are checkpointed, of ``all_blocks``.
        family_noise: the noise of each family of ``rest``; gradient: the squared norm of the gradient of the batch.
        cheaper, dearer: the plans for about a tenth less and more memory, if there are any.
    """

    total: str
    limit: int
    before: int | None
    after: int
    rest: RestConfig | None
    blocks: tuple[str, ...]
    all_blocks: int
    module_rests: Mapping[str, RestConfig]
    family_noise: Mapping[str, float]
    gradient: float
    cheaper: NearbyPlan | None
    dearer: NearbyPlan | None

    @property
    def noise(self) -> float:
        """Return D² under the plan: the expected squared error of all gradients together."""
        return super().noise + sum(self.family_noise.values())

    def inside(self, part: str) -> TotalPlan:
        """Return the plan with names as a part of the model has them, which holds all that is named."""

        def own(name: str) -> str:
            return name.removeprefix(f"{part}.")

        return replace(
            self,
            configs={own(name): config for name, config in self.configs.items()},
            parts=tuple(replace(each, layers=tuple(map(own, each.layers))) for each in self.parts),
            blocks=tuple(map(own, self.blocks)),
            module_rests={own(name): rest for name, rest in self.module_rests.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as dicts, lists, strings and numbers; ``from_json`` reads them."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> TotalPlan:
        """Return the plan that ``to_json`` wrote."""
        read = dict(written)
        read["configs"] = {name: _config(each) for name, each in read["configs"].items()}
        read["parts"] = tuple(
            PlannedLayers(**(part | {"layers": tuple(part["layers"]), "config": _config(part["config"])}))
            for part in read["parts"]
        )
        read["rest"] = _rest(read["rest"])
        read["module_rests"] = {name: RestConfig(**each) for name, each in read["module_rests"].items()}
        read["blocks"] = tuple(read["blocks"])
        for name in ("cheaper", "dearer"):
            if (other := read[name]) is not None:
                read[name] = NearbyPlan(**(other | {"rest": _rest(other["rest"])}))
        return cls(**read)

    def __str__(self) -> str:
        return "\n".join([*self._totals(), "", *self._table(), "", *self._nearby()])

    def _totals(self) -> Iterator[str]:
        before = f"does not fit -> {readable(self.after)}" if self.before is None else change(self.before, self.after)
        free = 1 - self.after / self.limit if self.limit else 0.0
        yield f"{_NAMES[self.total]}: {before}, within the limit of {readable(self.limit)} ({free:.1%} of it free)"
        if self.total != "kept":
            yield f"all kept for backward: {change(self.kept_before, self.kept_after)}"
        yield f"expected noise of the gradient: {self._in_words(self.noise)}"
        if self.rest is not None:
            yield f"everything else that backward keeps: {self.rest.in_words()}"
            for name, rest in self.module_rests.items():
                yield f"  but in {name}: {_difference(rest, self.rest)}"
        if self.blocks:
            yield f"checkpointed, so run twice: {len(self.blocks)} of {self.all_blocks} blocks: {together(self.blocks)}"

    def _table(self) -> Iterator[str]:
        if self.parts:
            yield str(self.layer_table())

    def _nearby(self) -> Iterator[str]:
        for name, plan in (("less", self.cheaper), ("more", self.dearer)):
            if plan is None:
                yield f"with {name} memory: no other plan"
                continue
            blocks = f", {plan.blocks} of {self.all_blocks} blocks checkpointed" if plan.blocks else ""
            rest = "" if plan.rest is None else f"; {plan.rest.in_words()}"
            yield f"with {name} memory: {readable(plan.after)}, noise {self._in_words(plan.noise)}{blocks}{rest}"

    def _in_words(self, noise: float) -> str:
        if not noise:
            return "none"
        share = 100 * math.sqrt(noise / self.gradient) if self.gradient else None
        return f"{noise:.3g}" + ("" if share is None else f", an error of {share:.2g}% of its length")


def _difference(rest: RestConfig, usual: RestConfig) -> str:
    """Name the families that have other bits than usual."""
    bits = {name: getattr(rest, name) for name in FAMILIES if getattr(rest, name) != getattr(usual, name)}
    return ", ".join(f"{name} as it is" if each is None else f"{name} {each} bits" for name, each in bits.items())


def _config(written: dict[str, Any] | None) -> SketchConfig | None:
    return None if written is None else SketchConfig(**written)


def _rest(written: dict[str, Any] | None) -> RestConfig | None:
    return None if written is None else RestConfig(**written)


def _plain(value: Any) -> Any:
    if isinstance(value, (SketchConfig, RestConfig, PlannedLayers, NearbyPlan)):
        return {name: _plain(each) for name, each in asdict(value).items()}
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (tuple, list)) else value

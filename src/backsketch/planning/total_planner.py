"""plan_total: what to keep of a whole step, so that all kept for backward, or the peak, is within a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from ..memory.untouched_model import same_randomness
from .budget import as_budget, too_small
from .filling import Filling
from .model_setting import ModelSetting
from .plan_result import PlanError, PlannedLayers
from .step_choices import Choice, Found
from .step_options import StepOptions
from .total_plan import NearbyPlan, TotalPlan
from .total_search import LimitError, TotalSearch

_NEARBY = 0.1  # of the total: how far away the other plans are that a plan names
_SHORT = 3  # settings that are measured for each of them


@same_randomness()
def plan_total(options: StepOptions, given: object, asked: Sequence[str], noise: float) -> TotalPlan:
    """Return the plan of least noise within the limit that is ``given``, bytes or a share of the exact model's total.

    Args:
        options: what may be chosen, and how it is measured.
        asked: the layers that the plan is to name.
        noise: how much of it, relative to ``sketch_(model, rest=True)``, comes before checkpointed blocks.
    """
    meter, exact = options.meter, ModelSetting()
    before, limit = meter(exact), as_budget(given, meter.total)
    if isinstance(limit, float):
        if math.isinf(before):
            raise PlanError(f"{meter.total} must be given in bytes: the exact model does not fit into memory")
        limit = int(limit * before)
    if before <= limit:
        return _result(options, Found(Choice(exact), before), limit, asked, None, None)
    cap = noise * options.with_blocks(0).recommended_noise(meter.model)
    search = TotalSearch(meter, cache(options.with_blocks), len(options.blocks), cap)
    try:
        found = search.within(limit)
        choices, modules = search.choices_of(found.choice), options.modules_outside(found.choice.setting.blocks)
        found = Filling(choices, modules, meter, limit).filled(found)
    except LimitError as error:
        whole = 0 if math.isinf(before) else int(before)
        words = too_small(meter.total, given, limit, error.least, whole, "of the exact model")
        raise PlanError(words) from None
    return _result(options, found, limit, asked, _cheaper(search, found), _dearer(search, found, before))


def _result(
    options: StepOptions,
    found: Found,
    limit: int,
    asked: Sequence[str],
    cheaper: NearbyPlan | None,
    dearer: NearbyPlan | None,
) -> TotalPlan:
    meter, choice = options.meter, found.choice
    setting, before = choice.setting, meter(ModelSetting())
    parts = tuple(
        PlannedLayers(
            layers=part.layers,
            config=point.choice,
            bytes_before=max(each.bytes for each in part.points),
            bytes_after=point.bytes,
            noise=point.noise,
        )
        for part, point in choice.parts
    )
    return TotalPlan(
        configs={name: setting.configs.get(name) for name in asked},
        parts=parts,
        budget=sum(part.bytes_after for part in parts),
        kept_before=options.kept_before,
        kept_after=int(meter.kept(setting)),
        total=meter.total,
        limit=limit,
        before=None if math.isinf(before) else int(before),
        after=int(found.total),
        rest=setting.rest,
        blocks=setting.blocks,
        module_rests=setting.module_rests,
        all_blocks=len(options.blocks),
        family_noise=choice.families,
        gradient=options.measured_families[1] if before > limit else 0.0,
        cheaper=cheaper,
        dearer=dearer,
    )


def _cheaper(search: TotalSearch, found: Found) -> NearbyPlan | None:
    """Return what the plan for about a tenth less would be, from a short search; None if there is none."""
    try:
        return _nearby(search.within(int((1 - _NEARBY) * found.total), tries=_SHORT))
    except LimitError:
        return None


def _dearer(search: TotalSearch, found: Found, exact: float) -> NearbyPlan | None:
    """Return what the plan for about a tenth more would be, or for the least more that lowers noise or time."""
    blocks = found.choice.setting.blocks
    for more in (_NEARBY, 2 * _NEARBY, 4 * _NEARBY):
        if (limit := int((1 + more) * found.total)) >= exact:
            break
        other = search.within(limit, tries=_SHORT) if blocks else search.beyond(found, limit, _SHORT)
        if other.total > found.total:
            return _nearby(other)
    return None if math.isinf(exact) else NearbyPlan(after=int(exact), noise=0.0, blocks=0, rest=None)


def _nearby(found: Found) -> NearbyPlan:
    setting = found.choice.setting
    return NearbyPlan(after=int(found.total), noise=found.choice.noise, blocks=len(setting.blocks), rest=setting.rest)

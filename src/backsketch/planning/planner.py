"""plan: a config for every layer, for a budget of bytes and the least noise."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, TypeAlias, overload

from torch import nn

from ..argument_checks import check_model
from ..config import SketchConfig, check_config
from ..convert.conversion import Where, chosen_configs, decisions_for, unsketch_
from ..masks.attention_mask import follow_attention_mask
from ..memory.optimizer_states import check_optimizer
from ..memory.recording import record_ledger
from ..memory.training_step import Loss, forward_to_loss, on_meta
from ..memory.untouched_model import untouched
from .budget import as_budget, too_small
from .layer_noise import added_noise
from .layer_points import RATIOS, check_bits, layer_points, storages_of
from .plan_result import Plan, PlanError, PlannedLayers
from .spending import spend
from .step_meter import TOTALS, StepMeter
from .step_options import StepOptions
from .total_plan import TotalPlan
from .total_planner import plan_total

Limit: TypeAlias = str | float | int


@overload
def plan(model: nn.Module, *args: Any, budget: Limit, **options: Any) -> Plan: ...


@overload
def plan(model: nn.Module, *args: Any, kept: Limit, **options: Any) -> TotalPlan: ...


@overload
def plan(model: nn.Module, *args: Any, peak: Limit, **options: Any) -> TotalPlan: ...


def plan(
    model: nn.Module,
    *args: Any,
    budget: Limit | None = None,
    kept: Limit | None = None,
    peak: Limit | None = None,
    optimizer: str | None = None,
    noise: float | None = None,
    config: SketchConfig | None = None,
    bits: Collection[int | None] | None = None,
    rotate: bool | None = None,
    where: Where | None = None,
    loss: Loss | None = None,
    **kwargs: Any,
) -> Plan:
    """Choose what a model keeps for backward, so that it is within a limit and adds the least noise.

    One of ``budget``, ``kept`` and ``peak`` is the limit. Under ``budget`` a plan chooses a ratio and bits for every
    linear layer; one forward and one backward pass of the exact model measure the noise. Layers that read one
    input get one config. Layers whose input another operation holds anyway stay exact, and so do those that ``sketch_``
    would leave exact.

    Under ``kept`` and ``peak`` a plan is about the whole step. It also chooses bits for the families of operations in
    ``RestConfig``, and, if that is not enough, blocks to checkpoint (``blocks_of(model)``), as few as possible. A dozen
    steps measure noise, and as many measure totals until one is just within the limit. The model is left exactly as
    it was; ``sketch_(model, plan)`` applies all of a plan.

    Args:
        model: in train() or eval(); a model in eval() is measured in train().
        *args, **kwargs: one batch, passed to the model.
        budget: what the inputs of linear layers may keep for backward: a share of what they keep today ("50%" or 0.5),
            or bytes (an int, or "500 MB", "2GiB"). Inputs that another operation holds anyway count neither in
            the budget nor in what is kept today.
        kept: what everything may keep for backward: a share of what the exact model keeps, or bytes, as for ``budget``.
        peak: the most that a step may hold at any time, with weights, gradients and the optimiser's states: bytes
            ("15GiB"), or a share of the exact model's peak. It counts tensors, not the allocator's rounding.
        optimizer: whose states count in ``peak``: "adamw", "adamw8bit", "sgd", or None if none do. The optimiser
            is taken to work in place. Only with ``peak``.
        noise: how much noise comes before blocks are checkpointed under ``kept`` and ``peak``, relative to that of
            ``sketch_(model, rest=True)``, 1 by default; 0 only checkpoints. More is added only if that is not enough
            either. Only with ``kept`` and ``peak``.
        config: the kind of sketch (under ``kept`` and ``peak`` only ``rows``), and whether to keep the mean; the plan
            chooses the ratio. By default ``rows``.
        bits: the values of ``SketchConfig.bits`` that the plan may choose from. By default the value in ``config`` if
            it has one, else all of them for ``rows``, and only None for kinds that mix rows: the noise of their
            rounding has no closed form.
        rotate: whether rows in few bits are rotated. By default what ``config`` says if it has bits, else whatever adds
            less noise to a layer.
        where: called with a layer's name and the layer; False leaves it exact, and its input out of the budget.
        loss: takes the output, returns a scalar. By default ``output.loss``, or the mean of the first output.
    """
    check_model(model)
    if on_meta(model):
        raise ValueError("plan measures noise, which a model on the meta device does not have; profile works there")
    base = SketchConfig() if config is None else check_config(config)
    allowed = storages_of(check_bits(bits, base), base, rotate)
    given = {name: limit for name, limit in (("budget", budget), ("kept", kept), ("peak", peak)) if limit is not None}
    if len(given) != 1:
        raise ValueError(f"give one of budget, kept and peak, got {', '.join(given) or 'none of them'}")
    ((name, asked_for),) = given.items()
    limit = as_budget(asked_for, name)
    for option, value, where_it_applies in (("optimizer", optimizer, ("peak",)), ("noise", noise, TOTALS)):
        if value is not None and name not in where_it_applies:
            whose = " and ".join(where_it_applies)
            raise ValueError(f"{option} must be None where {name} is given, it applies to {whose}: got {value!r}")
    allowed_noise = check_noise(1.0 if noise is None else noise)
    decided = decisions_for(model, replace(base, ratio=RATIOS[0], dim=None, bits=None, rotate=False), where)
    chosen = chosen_configs(decided)
    asked = [name for name, decision in decided.items() if not decision.stays]
    if name in TOTALS:
        if base.kind != "rows":
            raise ValueError(f"config must have the kind 'rows' where {name} is given, got {base.kind!r}")
        counted = None if optimizer is None else check_optimizer(optimizer)
        meter = StepMeter(model, args, kwargs, loss, name, counted)
        return plan_total(StepOptions(meter, chosen, base, allowed), asked_for, asked, allowed_noise)
    forward = partial(forward_to_loss, model, args, kwargs, loss)
    with untouched(model, (args, kwargs)):
        follow_attention_mask(unsketch_(model))
        ledger = record_ledger(model, forward)
    parts = [tuple(part) for part in ledger.parts(chosen) if ledger.released(part) > ledger.sketches(part)]
    if not parts:
        raise PlanError("no linear layer keeps an input of its own: there is nothing to plan")
    with untouched(model, (args, kwargs)):
        follow_attention_mask(unsketch_(model))
        measured = added_noise(model, [name for part in parts for name in part], base, forward, allowed)
    items = [list(layer_points(model, part, ledger, base, allowed, measured)) for part in parts]
    before = [max(point.bytes for point in points) for points in items]
    size = limit if isinstance(limit, int) else int(limit * sum(before))
    least = sum(min(point.bytes for point in points) for points in items)
    if size < least:
        raise PlanError(too_small("budget", budget, size, least, sum(before), "that linear inputs keep today"))
    points = spend(items, size)
    planned = tuple(
        PlannedLayers(layers=part, config=point.choice, bytes_before=today, bytes_after=point.bytes, noise=point.noise)
        for part, point, today in zip(parts, points, before, strict=True)
    )
    converted = {name: part.config for part in planned if part.config is not None for name in part.layers}
    after = ledger.kept_under(converted)
    return Plan({name: converted.get(name) for name in asked}, planned, size, ledger.kept, after)


def check_noise(noise: object) -> float:
    """Return ``noise``, or raise an error that says what is allowed."""
    if isinstance(noise, bool) or not isinstance(noise, Real) or not float(noise) >= 0:
        raise ValueError(f"noise must be a number that is not negative, got {noise!r}")
    return float(noise)

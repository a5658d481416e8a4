"""plan: a config for every layer, for a budget of bytes and the least noise."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..argument_checks import check_flag
from ..config import STORED_BITS, SketchConfig, check_config
from ..convert.conversion import Where, chosen_configs, decisions_for, unsketch_
from ..convert.left_exact import narrow_reason
from ..masks.attention_mask import follow_attention_mask
from ..memory.ledger import Ledger
from ..memory.recording import record_ledger
from ..memory.training_step import Loss, forward_to_loss, on_meta
from ..memory.untouched_model import untouched
from ..sketches import SKETCHES
from .budget import as_budget
from .layer_noise import CallNoise, Storage, added_noise
from .plan_result import Plan, PlanError, PlannedLayers
from .spending import Point, spend

RATIOS = (0.001, 0.002, 0.005, *(step / 100 for step in range(1, 101)))
ALL_BITS = (None, *STORED_BITS)


def plan(
    model: nn.Module,
    *args: Any,
    budget: str | float | int,
    config: SketchConfig | None = None,
    bits: Collection[int | None] | None = None,
    rotate: bool | None = None,
    where: Where | None = None,
    loss: Loss | None = None,
    **kwargs: Any,
) -> Plan:
    """Choose a ratio and bits for every linear layer so that what they keep fits ``budget`` and adds the least noise.

    One forward and one backward pass of the exact model measure the noise; the model is left exactly as it was.
    Layers that read one input get one config. Layers whose input another operation holds anyway stay exact, and so do
    those that ``sketch_`` would leave exact.

    Args:
        model: in train() or eval(); a model in eval() is measured in train().
        *args, **kwargs: one batch, passed to the model.
        budget: what the inputs of linear layers may keep for backward: a share of what they keep today ("50%" or 0.5),
            or bytes (an int, or "500 MB", "2GiB"). Inputs that another operation holds anyway count neither in
            the budget nor in what is kept today.
        config: the kind of sketch, and whether to keep the mean; the plan chooses the ratio. By default ``rows``.
        bits: the values of ``SketchConfig.bits`` that the plan may choose from. By default the value in ``config`` if
            it has one, else all of them for ``rows``, and only None for kinds that mix rows: the noise of their
            rounding has no closed form.
        rotate: whether rows in few bits are rotated. By default what ``config`` says if it has bits, else whatever adds
            less noise to a layer.
        where: called with a layer's name and the layer; False leaves it exact, and its input out of the budget.
        loss: takes the output, returns a scalar. By default ``output.loss``, or the mean of the first output.
    """
    if on_meta(model):
        raise ValueError("plan measures noise, which a model on the meta device does not have; profile works there")
    base = SketchConfig() if config is None else check_config(config)
    allowed = _storages(check_bits(bits, base), base, rotate)
    budget = as_budget(budget)
    forward = partial(forward_to_loss, model, args, kwargs, loss)
    with untouched(model, (args, kwargs)):
        follow_attention_mask(unsketch_(model))
        ledger = record_ledger(model, forward)
    decided = decisions_for(model, replace(base, ratio=RATIOS[0], dim=None, bits=None, rotate=False), where)
    chosen = chosen_configs(decided)
    parts = [tuple(part) for part in ledger.parts(chosen) if ledger.released(part) > ledger.sketches(part)]
    if not parts:
        raise PlanError("no linear layer keeps an input of its own: there is nothing to plan")
    with untouched(model, (args, kwargs)):
        follow_attention_mask(unsketch_(model))
        noise = added_noise(model, [name for part in parts for name in part], base, forward, allowed)
    items = [list(_points(model, part, ledger, base, allowed, noise)) for part in parts]
    before = [max(point.bytes for point in points) for points in items]
    limit = budget if isinstance(budget, int) else int(budget * sum(before))
    least = sum(min(point.bytes for point in points) for points in items)
    if limit < least:
        raise PlanError(
            f"budget must be at least {least} bytes, {least / sum(before):.1%} of the {sum(before)} that linear inputs "
            f"keep today: got {budget!r}, which is {limit} bytes"
        )
    points = spend(items, limit)
    planned = tuple(
        PlannedLayers(layers=part, config=point.choice, bytes_before=size, bytes_after=point.bytes, noise=point.noise)
        for part, point, size in zip(parts, points, before, strict=True)
    )
    converted = {name: part.config for part in planned if part.config is not None for name in part.layers}
    kept = ledger.kept_under(converted)
    asked = [name for name, decision in decided.items() if not decision.stays]
    return Plan({name: converted.get(name) for name in asked}, planned, limit, ledger.kept, kept)


def _points(
    model: nn.Module,
    part: Sequence[str],
    ledger: Ledger,
    base: SketchConfig,
    storages: Collection[Storage],
    noise: Mapping[str, Sequence[CallNoise]],
) -> Iterator[Point[SketchConfig | None]]:
    """Yield the choices for the layers of ``part``: exact, or sketched with any config that saves bytes.

    Configs for which one of the layers is too narrow are left out, as ``sketch_`` would refuse them. Of rotated rows
    and others, which take the same bytes, only those with less noise are looked at.
    """
    calls = [call for name in part for call in noise[name]]
    quietest = dict(sorted(storages, key=lambda storage: -sum(call.rounding[storage] for call in calls)))
    configs = [
        replace(base, ratio=ratio, dim=None, bits=bits, rotate=rotate)
        for ratio in RATIOS
        for bits, rotate in quietest.items()
    ]
    layers = [model.get_submodule(name) for name in part]
    own = ledger.without_other_layers(part)
    exact = own.released(dict.fromkeys(part, configs[0]))
    yield Point(None, exact, 0.0)
    for config in configs:
        chosen = dict.fromkeys(part, config)
        size = exact - own.released(chosen) + own.sketches(chosen)
        if size < exact and not any(narrow_reason(layer, config) for layer in layers):
            yield Point(config, size, sum(call.under(config) for call in calls))


def check_bits(bits: Collection[int | None] | None, config: SketchConfig) -> Collection[int | None]:
    """Return the values of ``bits`` that a plan may choose from: those given, or else those that ``config`` allows."""
    if bits is None:
        bits = (config.bits,) if SKETCHES[config.kind].mixes_rows or config.bits is not None else ALL_BITS
    if not isinstance(bits, Collection) or not bits or any(each not in ALL_BITS for each in bits):
        raise ValueError(f"bits must be some of {ALL_BITS}, got {bits!r}")
    if SKETCHES[config.kind].mixes_rows and set(bits) != {None}:
        raise ValueError(f"bits must be (None,) for kinds that mix rows, got {bits!r} for {config.kind!r}")
    return bits


def _storages(bits: Collection[int | None], config: SketchConfig, rotate: bool | None) -> list[Storage]:
    """List the ways to store rows that may be planned."""
    if rotate is not None:
        check_flag("rotate", rotate)
        if rotate and set(bits) == {None}:
            raise ValueError("rotate=True needs bits: rows stored as they are have no rounding to lower")
        ways: tuple[bool, ...] = (rotate,)
    else:
        ways = (False, True) if config.bits is None else (config.rotate,)
    return [(each, way) for each in bits for way in ((False,) if each is None else ways)]

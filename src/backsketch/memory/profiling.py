"""profile: what one training step keeps for backward, layer by layer, and at its peak, before and after sketching."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn

from ..argument_checks import check_model
from ..convert.conversion import (
    Configs,
    chosen_configs,
    decisions_for,
    left_exact_because,
    no_layer,
    sketch_,
    unsketch_,
)
from ..convert.converted_state import present_configs
from ..convert.layer_classes import sketched_type
from ..convert.left_exact import FROZEN, FUSED_LOSS
from ..losses.fused_models import can_fuse, is_deferring_head, language_models
from ..masks.attention_mask import follow_attention_mask
from ..rest.packing_modules import check_rest, present_rests, rest_of, switch_on_again
from ..rest.rest_config import Rest
from .claims import Chosen
from .family_profile import FamilyProfile
from .ledger import Ledger
from .meta_device import meta_step
from .peak import peak_memory
from .profile_result import LayerProfile, Profile
from .recording import record_ledger
from .step_measure import measure_forward
from .training_step import Loss, forward_to_loss, on_meta, to_device_of
from .untouched_model import untouched


def profile(
    model: nn.Module,
    *args: Any,
    config: Configs | None = None,
    loss: Loss | None = None,
    rest: Rest = None,
    **kwargs: Any,
) -> Profile:
    """Measure a training step of ``model`` on a batch, and what it would be under ``config``.

    The model runs forward once, then forward and backward twice, and is left exactly as it was. On the meta device it
    needs neither memory nor weights, and is measured with the fused kernels of an accelerator. With ``rest`` it runs
    forward once more.

    Args:
        model: in train() or eval(); a model in eval() is measured in train().
        *args, **kwargs: one batch, passed to the model.
        config: as ``sketch_`` takes it. By default what a converted model has, or ``SketchConfig.recommended()``.
        loss: takes the output, returns a scalar. By default ``output.loss``, or the mean of the first output.
        rest: as ``sketch_`` takes it. By default what is on.
    """
    check_model(model)
    packing = check_rest(rest) or rest_of(model)
    rests = {} if rest is not None else present_rests(model)
    args, kwargs = to_device_of(model, (args, kwargs))
    forward = partial(forward_to_loss, model, args, kwargs, loss)
    present = present_configs(model) if config is None else {}
    decided = {} if present else decisions_for(model, config)
    chosen = present or chosen_configs(decided)
    left_exact = {name: decision.reason for name, decision in decided.items() if decision.config is None}
    around = meta_step if on_meta(model) else nullcontext
    with untouched(model, (args, kwargs)), around():
        follow_attention_mask(unsketch_(model))
        ledger = record_ledger(model, forward)
    unpaid = ledger.unpaid(chosen)
    paying = {name: own for name, own in chosen.items() if name not in unpaid}
    by_name = {re.compile(re.escape(name)): own for name, own in paying.items()}
    peaks, kept_after = [], ledger.kept_under(paying)
    families: tuple[FamilyProfile, ...] = ()
    for converted in (False, True):
        with untouched(model, (args, kwargs)), around():
            unsketch_(model)
            if converted and (by_name or packing):
                sketch_(model, by_name or None, None if by_name else no_layer, rest=packing)
                switch_on_again(model, rests)
            if converted and packing is not None:
                kept_after, families = measure_forward(model, forward)[1:]
            with peak_memory(model) as peak:
                forward().backward()  # type: ignore[no-untyped-call]
            peaks.append(peak.peak)
    return Profile(
        layers=tuple(_layers(model, ledger, chosen, {**left_exact, **unpaid})),
        ledger=ledger,
        chosen=chosen,
        kept_before=ledger.kept,
        kept_after=kept_after,
        kept_if_all=ledger.kept_under(chosen) if packing is None else kept_after,
        peak_before=peaks[0],
        peak_after=peaks[1],
        rest=packing,
        families=families,
        language_models=tuple(language_models(model)),
        can_fuse=can_fuse(model),
    )


def _layers(model: nn.Module, ledger: Ledger, chosen: Chosen, reasons: Mapping[str, str]) -> Iterator[LayerProfile]:
    for name, module in model.named_modules():
        if sketched_type(module) is None:
            continue
        calls = list(ledger.calls_of(name))
        config = chosen.get(name)
        storages = {key for call in calls for key in call.storages}
        sources = {call.source: call for call in calls}
        note = reasons.get(name, "" if config else left_exact_because(module) or "not selected")
        if not calls and name not in ledger.hooked:
            note = "keeps nothing: checkpointed or not run" if module.weight.requires_grad else FROZEN
            note = FUSED_LOSS if is_deferring_head(module) else note
        yield LayerProfile(
            name=name,
            calls=len(calls),
            rows=sum(call.rows for call in calls),
            in_features=calls[0].in_features if calls else 0,
            input_bytes=sum(ledger.sizes.get(key, 0) for key in storages),
            held_by=ledger.holders(name, chosen),
            shares_with=_shares_with(name, ledger),
            config=config,
            sketch_bytes=sum(call.kept_under(config) for call in sources.values()) if config else 0,
            pays=bool(calls) and config is not None and name not in reasons,
            note=note,
        )


def _shares_with(name: str, ledger: Ledger) -> tuple[str, ...]:
    members = dict.fromkeys(other for group in ledger.groups if name in group for other in group)
    return tuple(other for other in members if other != name)

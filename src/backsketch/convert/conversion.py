"""sketch_ and unsketch_: turn linear layers into sketched ones in place, and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import nn

from ..argument_checks import check_flag, check_model
from ..config import SketchConfig
from ..linear.algorithm import EXACT_IN_CHECKPOINT, INPUT_IS_HELD, RAN_IN_CHECKPOINT
from ..losses.fused_models import is_deferring_head
from ..masks.attention_mask import follow_attention_mask, forget_attention_mask
from ..rest.packing_modules import check_rest, set_apart, switch_off, switch_on
from ..rest.rest_config import Rest
from ..sharded import become
from ..torch_private import SHOWS_WHAT_IS_SAVED
from .checkpointed_blocks import checkpoint_, uncheckpoint_
from .layer_classes import exact_type, is_sketched, sketched_type
from .left_exact import (
    FUSED_LOSS,
    NEVER_CALLED,
    lora_b_layers,
    lora_b_reason,
    narrow_reason,
    uncalled_layers,
    weight_of,
)
from .name_rules import NameRules

if TYPE_CHECKING:
    from ..memory.profile_result import Profile

Model = TypeVar("Model", bound=nn.Module)
Configs: TypeAlias = SketchConfig | Mapping[Any, SketchConfig | None]  # keys are Pattern; Any accepts dict[str, ...]
Where: TypeAlias = Callable[[str, nn.Module], bool]

_REASON, _OWN_CONFIG = "_left_exact_because", "_config_before_sketching"


@dataclass(frozen=True, slots=True)
class Decision:
    """What sketch_ does to a layer: sketch it with ``config``, or make it exact, or leave it as it is (``stays``)."""

    config: SketchConfig | None = None
    reason: str = ""
    stays: bool = False


def sketch_(
    model: Model,
    config: Configs | None = None,
    where: Where | None = None,
    profile: Profile | None = None,
    *,
    checkpointed: bool = True,
    rest: Rest = None,
) -> Model:
    """Convert the linear layers of ``model`` in place and return it.

    A layer keeps its identity: only its class changes, so parameters, optimisers, hooks, tied weights and
    ``state_dict`` are untouched. Only exact ``nn.Linear`` and transformers' ``Conv1D`` are converted, because
    a subclass may have its own forward. ``print(summary(model))`` tells what was converted, what was not, and why.
    A layer so narrow that rows in few bits would keep over half of its input's bytes stays exact.

    Args:
        model: any module, a single layer included.
        config: one config for all layers, or a mapping from name pattern to config. A pattern is a glob over the
            whole name ("encoder.*.query") or a compiled regular expression that must match all of it. The first match
            wins; None makes a layer exact, and one without a match stays as it is. By default
            ``SketchConfig.recommended()`` for the type of each layer's weight. PEFT's lora_B is converted only where a
            pattern says so. The plan of a whole step, from ``plan(peak=...)`` or ``plan(kept=...)``, also says what
            ``rest`` is and which blocks are checkpointed.
        where: called with a layer's name and the layer; False leaves it as it is.
        profile: the result of ``backsketch.profile``. Layers for which a sketch saves nothing are then left exact, and
            a warning names layers that read one input but would keep more than one sketch of it.
        checkpointed: False leaves layers exact while they run inside activation checkpointing. A checkpoint keeps none
            of their inputs between the passes, so a sketch adds noise there, and saves memory only while the region
            runs again.
        rest: also keep in few bits, while ``model`` or a part of it trains, what everything else keeps for backward:
            activation functions, norms, attention, products, masks. True is ``RestConfig.recommended()``; a number of
            bits holds for every family, but masks, which take one; a ``RestConfig`` says all. By default
            everything else stays as it is now: an earlier ``rest`` holds until ``unsketch_``. It reaches what runs in
            a forward of the model and is not compiled, so neither a loss computed outside nor ``torch.compile``.
    """
    check_model(model)
    check_choice(config, where)
    check_flag("checkpointed", checkpointed)
    blocks: tuple[str, ...] | None = getattr(config, "blocks", None)  # which only the plan of a whole step has
    if blocks is not None:
        if rest is not None:
            raise ValueError(f"rest must be None with the plan of a whole step, which has its own, got {rest!r}")
        rest = config.rest  # type: ignore[union-attr]
    everything_else = check_rest(rest)
    if not checkpointed and not SHOWS_WHAT_IS_SAVED:
        raise RuntimeError(f"checkpointed=False needs torch 2.8 or newer, got {torch.__version__}")
    rules = NameRules(config)
    modules, decided = dict(model.named_modules()), _decide(model, rules, where)  # before any layer is changed
    unpaid = {} if profile is None else _consult(profile, chosen_configs(decided))
    if blocks is not None:
        switch_off(model)
        checkpoint_(uncheckpoint_(model), blocks)
    converted = False
    for name, decision in decided.items():
        module, reason = modules[name], unpaid.get(name, decision.reason)
        if decision.config is not None and name not in unpaid:
            convert_layer(module, decision.config, checkpointed)
            converted = True
            continue
        if not decision.stays:
            _restore(module)
        _leave(module, reason)
    for pattern in rules.unused:
        warnings.warn(f"sketch_: pattern {pattern!r} matches no linear layer of the model", stacklevel=2)
    if any(exact_type(module) is not None for module in model.modules()):
        follow_attention_mask(model)
    else:
        forget_attention_mask(model)
    packs = everything_else is not None and switch_on(model, everything_else)
    for name, own in getattr(config, "module_rests", {}).items():
        set_apart(modules[name], own)
    if everything_else is not None and not packs:
        warnings.warn("sketch_: rest has no effect: only linear layers of the model have a forward", stacklevel=2)
    if not converted and not packs and blocks is None:
        warnings.warn("sketch_ converted no layer; print(backsketch.summary(model)) tells why", stacklevel=2)
    return model


def unsketch_(model: Model) -> Model:
    """Turn every sketched layer of ``model`` back into the class it was, in place, and return the model.

    ``rest`` is switched off, and ``checkpoint_`` is undone. A layer stays sketched if its class is a subclass of a
    sketched one, or if its forward was replaced. A warning names it.
    """
    check_model(model)
    for name, module in model.named_modules():
        _restore(module)
        module.__dict__.pop(_REASON, None)
        if is_sketched(module):
            kind = type(module).__name__
            own = "forward" if _has_own_forward(module) else "class"
            warnings.warn(
                f"unsketch_: {name or 'the model'} ({kind}) has a {own} of its own: it stays sketched", stacklevel=2
            )
    switch_off(model)
    uncheckpoint_(model)
    forget_attention_mask(model)
    return model


def check_choice(config: object, where: object) -> None:
    """Raise TypeError or ValueError unless ``sketch_`` accepts these arguments."""
    if config is not None:
        NameRules(config)
    if where is not None and not callable(where):
        raise TypeError(f"where must be a function of a layer's name and the layer, got {where!r}")


def no_layer(name: str, module: nn.Module) -> bool:
    """Choose no layer: the ``where`` that leaves all linear layers as they are."""
    return False


def configs_for(model: nn.Module, config: Configs | None = None, where: Where | None = None) -> dict[str, SketchConfig]:
    """Return name -> config for the layers that ``sketch_`` would convert."""
    return chosen_configs(decisions_for(model, config, where))


def decisions_for(model: nn.Module, config: Configs | None = None, where: Where | None = None) -> dict[str, Decision]:
    """Return layer name -> what ``sketch_`` would do to the layer, for all layers that can be converted."""
    return _decide(model, NameRules(config), where)


def left_exact_because(module: nn.Module) -> str | None:
    """Return why the last sketch_ left this convertible layer exact, if one did."""
    return module.__dict__.get(_REASON)


def _decide(model: nn.Module, rules: NameRules, where: Where | None) -> dict[str, Decision]:
    uncalled, lora_b = uncalled_layers(model), lora_b_layers(model) if rules.one_for_all else set()

    def decide(name: str, module: nn.Module) -> Decision:
        config, reason = rules.match(name, weight_of(module).dtype)
        if where is not None and not where(name, module):
            return Decision(reason="where() returned False", stays=True)
        if config is None:
            return Decision(reason=reason or "no pattern matches its name", stays=reason is None)
        if module in uncalled:
            reason = NEVER_CALLED
        elif is_deferring_head(module):
            reason = FUSED_LOSS
        elif _has_own_forward(module) and exact_type(module) is None:
            reason = "its forward was replaced, as accelerate's hooks do: convert it before that"
        elif module in lora_b:
            reason = lora_b_reason(module)
        else:
            reason = narrow_reason(module, config)
        return Decision(config) if reason is None else Decision(reason=reason)

    return {name: decide(name, module) for name, module in model.named_modules() if sketched_type(module) is not None}


def chosen_configs(decided: Mapping[str, Decision]) -> dict[str, SketchConfig]:
    """Return name -> config for the layers that are to be sketched."""
    return {name: decision.config for name, decision in decided.items() if decision.config is not None}


def _consult(profile: Profile, chosen: dict[str, SketchConfig]) -> dict[str, str]:
    """Return layer name -> why a sketch does not pay, and warn if layers that share an input are not all converted."""
    if not hasattr(profile, "unpaid"):
        raise TypeError(f"profile must be what backsketch.profile returns, got {type(profile).__name__}")
    if unseen := sorted(chosen.keys() - {layer.name for layer in profile.layers}):
        warnings.warn(
            f"sketch_: the profile has no layer {', '.join(unseen)}: whether a sketch pays there is not known",
            stacklevel=3,
        )
    unpaid = profile.unpaid(chosen)
    for group in profile.split_groups({name: config for name, config in chosen.items() if name not in unpaid}):
        warnings.warn(
            f"sketch_: {', '.join(group)} read the same input; unless all of them are converted with one config, "
            "they keep more than one sketch of it, or the input as well",
            stacklevel=3,
        )
    return unpaid


def _has_own_forward(module: nn.Module) -> bool:
    """Tell whether ``forward`` was replaced on the instance, as accelerate's hooks do."""
    return "forward" in module.__dict__


def convert_layer(module: nn.Module, config: SketchConfig, checkpointed: bool) -> None:
    """Turn a layer into a sketched one, or give a sketched one another config."""
    twin = sketched_type(module)
    assert twin is not None
    if exact_type(module) is None and "config" in module.__dict__:  # an attribute of that name which is not ours
        module.__dict__[_OWN_CONFIG] = module.__dict__["config"]
    become(module, twin)
    module.__dict__["config"] = config
    module.__dict__[EXACT_IN_CHECKPOINT] = not checkpointed
    module.__dict__.pop(_REASON, None)


def _restore(module: nn.Module) -> None:
    if (exact := exact_type(module)) is not None and not _has_own_forward(module):
        become(module, exact)
        del module.config
        for name in (EXACT_IN_CHECKPOINT, RAN_IN_CHECKPOINT, INPUT_IS_HELD):
            module.__dict__.pop(name, None)
        if _OWN_CONFIG in module.__dict__:
            module.__dict__["config"] = module.__dict__.pop(_OWN_CONFIG)


def _leave(module: nn.Module, reason: str) -> None:
    if exact_type(module) is None:
        module.__dict__[_REASON] = reason

"""Modules whose forward runs inside packing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..changed_forward import PACKING, change_forward, register_way, restore_forward, setting_of, why_not_changeable
from ..torch_private import SHOWS_WHAT_IS_SAVED
from .packing_mode import packing, packing_apart
from .rest_config import RestConfig


@dataclass(frozen=True, slots=True)
class OwnRest:
    """The config of a module that keeps to it also inside a model that has another one."""

    config: RestConfig


def check_rest(rest: object) -> RestConfig | None:
    """Return the config that ``rest=`` means, so that a wrong argument, or a torch too old for it, fails at once."""
    config = RestConfig.of(rest)
    if config is not None and not SHOWS_WHAT_IS_SAVED:
        raise RuntimeError(f"rest={rest!r} needs torch 2.8 or newer, got {torch.__version__}")
    return config


def switch_on(model: nn.Module, config: RestConfig) -> bool:
    """Let ``model``, and each part of it that has parts, run inside ``packing(config)``; tell whether any now does.

    Parts too, since they can be called without the whole: by a LightningModule, by PEFT or by the user.
    """
    chosen = [module for module in model.modules() if _packs(module) or can_pack(module, is_root=module is model)]
    for module in chosen:
        change_forward(module, PACKING, config)
    return bool(chosen)


def set_apart(module: nn.Module, config: RestConfig) -> None:
    """Let a module inside a model that is switched on, and its parts that are, keep to a config of their own."""
    for part in module.modules():
        if _packs(part):
            change_forward(part, PACKING, OwnRest(config))


def switch_off(model: nn.Module) -> None:
    """Undo ``switch_on``: give every module its own forward back."""
    for module in model.modules():
        restore_forward(module, PACKING)


def rest_of(model: nn.Module) -> RestConfig | None:
    """Return the config that is on, that of the outermost module if they differ; None if none is."""
    first = next(iter(present_rests(model).values()), None)
    return first.config if isinstance(first, OwnRest) else first


def present_rests(model: nn.Module) -> dict[str, RestConfig | OwnRest]:
    """Return name -> config for the modules that run inside packing."""
    return {name: setting_of(module, PACKING) for name, module in model.named_modules() if _packs(module)}


def switch_on_again(model: nn.Module, rests: Mapping[str, RestConfig | OwnRest]) -> None:
    """Switch on the modules that ``present_rests`` returned earlier, and no others."""
    for name, config in rests.items():
        change_forward(model.get_submodule(name), PACKING, config)


@register_way(PACKING)
def _run_inside_packing(
    module: nn.Module, config: RestConfig | OwnRest, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if torch.compiler.is_compiling() or not module.training:
        return forward(*args, **kwargs)
    with packing_apart(config.config) if isinstance(config, OwnRest) else packing(config):
        return forward(*args, **kwargs)


def can_pack(module: nn.Module, *, is_root: bool = False) -> bool:
    """Tell whether a module computes in a forward of its class, and is worth it: the root, or one that has parts."""
    return (is_root or next(module.children(), None) is not None) and why_not_changeable(module) is None


def _packs(module: nn.Module) -> bool:
    return setting_of(module, PACKING) is not None

"""Modules whose forward runs in another way. Such a module has a subclass of its own class, as a sketched layer has.

A hook could not do it: torch does not call hooks after a KeyboardInterrupt, and what a hook switched on would stay on.
Nor could a ``forward`` on the instance: it would refer to its own module, and copies would run the forward of the
original. All ways share one subclass, so they can be taken in any order and given up in any order.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize

from .linear.layer import refuse_script
from .linear.twin_registry import twins
from .made_classes import one_for_each_class, subclass_with_forward
from .sharded import become, own_class

# Where a module has its setting for each way, the outermost first: inputs of checkpoints are packed too, and a
# checkpoint runs a fused loss again.
PACKING, CHECKPOINTING, FUSED_LOSS = WAYS = ("_rest_config", "_checkpointed_block", "_fused_loss")

Way: TypeAlias = Callable[..., Any]  # takes the module, its setting, its forward and what that is called with

_OWN_CLASS = "_class_with_own_forward"  # in the __dict__ of a changed class
_ways: dict[str, Way] = {}


def register_way(name: str) -> Callable[[Way], Way]:
    """Make a function the one that runs the forward of modules with a setting under ``name``, one of ``WAYS``."""

    def register(way: Way) -> Way:
        assert name in WAYS
        _ways[name] = way
        return way

    return register


def change_forward(module: nn.Module, name: str, setting: object) -> None:
    """Let the forward of ``module`` run in the way of this name; ``setting`` is not None."""
    if not _is_changed(module):
        become(module, changed_class(own_class(module)))
    module.__dict__[name] = setting


def restore_forward(module: nn.Module, name: str) -> None:
    """Undo ``change_forward``: give the module its own class back, unless its forward runs in another way too."""
    module.__dict__.pop(name, None)
    if _is_changed(module) and not any(each in module.__dict__ for each in WAYS):
        become(module, class_before(module))


def setting_of(module: nn.Module, name: str) -> Any:
    """Return the setting of the way that a module's forward runs in, or None if it does not."""
    return module.__dict__.get(name) if _is_changed(module) else None


def class_before(module: nn.Module) -> type[nn.Module]:
    """Return the class that ``module`` had before its forward was changed and before fully_shard."""
    kind = own_class(module)
    before: type[nn.Module] = vars(kind).get(_OWN_CLASS, kind)
    return before


def why_not_changeable(module: nn.Module) -> str | None:
    """Return why the forward of ``module`` cannot be changed, or None if it can."""
    forward = inspect.getattr_static(type(module), "forward")
    if not isinstance(forward, FunctionType):
        return "its forward is not a method of its class"  # as that of a ScriptModule
    if forward is nn.Module.forward:
        return "it has no forward"
    if "forward" in module.__dict__:  # put there by accelerate, and bound to the class it had then
        return "its forward was replaced, as accelerate's hooks do"
    if parametrize.is_parametrized(module) or isinstance(module, parametrize.ParametrizationList):
        return "it is parametrized"  # so it has a class that torch takes away from it again
    if isinstance(module, (*twins(), *twins().values())):
        return "it is a linear layer"
    if _only_moves_data(module):
        return "it only wraps the module that computes"
    return None


def _is_changed(module: nn.Module) -> bool:
    return hasattr(type(module), _OWN_CLASS)


def _only_moves_data(module: nn.Module) -> bool:
    """Tell whether a module wraps another that computes: DataParallel, DDP, FSDP1."""
    wrappers: tuple[type, ...] = (DataParallel, DistributedDataParallel)
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrappers += (FullyShardedDataParallel,)
    return isinstance(module, wrappers)


@one_for_each_class
def changed_class(own: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``own`` whose forward runs in the ways that its instance has settings for.

    It has the same name.
    """

    @functools.wraps(own.forward)  # the Trainer reads the signature of forward
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Not super(): accelerate holds this function, and calls it also after the module has got its class back.
        run = functools.partial(own.forward, self)
        for name in reversed(WAYS):
            if (setting := self.__dict__.get(name)) is not None:
                run = functools.partial(_ways[name], self, setting, run)
        return run(*args, **kwargs)

    members = {"__prepare_scriptable__": lambda self: refuse_script(), _OWN_CLASS: own}
    return subclass_with_forward(own, forward, **members)

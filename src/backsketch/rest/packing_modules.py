"""Modules whose forward runs inside packing. Such a module has a subclass of its own class, as a sketched layer has.

A hook could not do it: torch does not call hooks after a KeyboardInterrupt, and packing would stay on. Nor could a
``forward`` on the instance: it would refer to its own module, and copies would run the forward of the original.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import sys
from collections.abc import Mapping
from types import FunctionType, new_class
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize

from ..linear.layer import refuse_script
from ..linear.twin_registry import twins
from ..sharded import become, own_class
from ..torch_private import SHOWS_WHAT_IS_SAVED
from .packing_mode import packing
from .rest_config import RestConfig

_CONFIG = "_rest_config"  # in the __dict__ of a module
_OWN_CLASS = "_class_without_packing"  # in the __dict__ of a packing class


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
    chosen = [module for module in model.modules() if _packs(module) or _can_pack(module, module is model)]
    for module in chosen:
        _pack(module, config)
    return bool(chosen)


def switch_off(model: nn.Module) -> None:
    """Undo ``switch_on``: give every module its own class back."""
    for module in model.modules():
        module.__dict__.pop(_CONFIG, None)
        if (own := vars(own_class(module)).get(_OWN_CLASS)) is not None:
            become(module, own)


def rest_of(model: nn.Module) -> RestConfig | None:
    """Return the config that is on, that of the outermost module if they differ; None if none is."""
    return next(iter(present_rests(model).values()), None)


def present_rests(model: nn.Module) -> dict[str, RestConfig]:
    """Return name -> config for the modules that run inside packing."""
    return {name: module.__dict__[_CONFIG] for name, module in model.named_modules() if _packs(module)}


def switch_on_again(model: nn.Module, rests: Mapping[str, RestConfig]) -> None:
    """Switch on the modules that ``present_rests`` returned earlier, and no others."""
    for name, config in rests.items():
        _pack(model.get_submodule(name), config)


def _packs(module: nn.Module) -> bool:
    return _CONFIG in module.__dict__ and hasattr(type(module), _OWN_CLASS)


def _pack(module: nn.Module, config: RestConfig) -> None:
    if not hasattr(type(module), _OWN_CLASS):
        become(module, packing_class(own_class(module)))
    module.__dict__[_CONFIG] = config


def _can_pack(module: nn.Module, is_root: bool) -> bool:
    """Tell whether a module computes in a forward of its class, and is worth it: the root, or one that has parts."""
    if not is_root and next(module.children(), None) is None:
        return False
    forward = inspect.getattr_static(type(module), "forward")
    linear = (*twins(), *twins().values())
    return (
        isinstance(forward, FunctionType)  # not that of a ScriptModule
        and forward is not nn.Module.forward  # which raises, as in a ModuleList
        and "forward" not in module.__dict__  # put there by accelerate, and bound to the class it had then
        and not parametrize.is_parametrized(module)  # has a class that torch takes away from it again
        and not isinstance(module, (*linear, parametrize.ParametrizationList))
        and not _only_moves_data(module)
    )


def _only_moves_data(module: nn.Module) -> bool:
    """Tell whether a module wraps another that computes: DataParallel, DDP, FSDP1."""
    wrappers: tuple[type, ...] = (DataParallel, DistributedDataParallel)
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrappers += (FullyShardedDataParallel,)
    return isinstance(module, wrappers)


# A class made at run time, as for a GraphModule, goes when nobody uses it, and so does its subclass.
_classes: WeakKeyDictionary[type[nn.Module], ref[type[nn.Module]]] = WeakKeyDictionary()


def packing_class(own: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``own`` whose forward runs inside packing; it has the same name."""
    known = _classes.get(own)
    kind = None if known is None else known()
    if kind is None:
        kind = _packing_class(own)
        _classes[own] = ref(kind)
    return kind


def _packing_class(own: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(own.forward)  # the Trainer reads the signature of forward
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Not super(): accelerate holds this function, and calls it also after the module has got its class back.
        if torch.compiler.is_compiling() or not self.training or (config := self.__dict__.get(_CONFIG)) is None:
            return own.forward(self, *args, **kwargs)
        with packing(config):
            return own.forward(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        """Refer to the class by ``own``: pickle finds classes by name."""
        reduced: Any = own.__reduce_ex__(self, max(2, protocol))
        made, arguments, *others = reduced
        if made is copyreg.__newobj__ and arguments[0] is kind:  # type: ignore[attr-defined]
            return new_instance, (own, *arguments[1:]), *others
        return reduced

    members = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "__prepare_scriptable__": lambda self: refuse_script(),
        "forward": forward,
        _OWN_CLASS: own,
    }
    kind: type[nn.Module] = new_class(own.__name__, (own,), exec_body=lambda namespace: namespace.update(members))
    return kind


def new_instance(own: type[nn.Module], *arguments: Any) -> nn.Module:
    """Return an empty instance of the packing class of ``own``, which copy and pickle then fill."""
    return own.__new__(packing_class(own), *arguments)

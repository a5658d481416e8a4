"""The own class of a layer that fully_shard was applied to: torch then makes one of FSDPModule and that class."""

from __future__ import annotations

import sys

from torch import nn


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module``, below what fully_shard made of it."""
    kind = type(module)
    own: type[nn.Module] = kind.__bases__[1] if _is_sharded(kind) else kind
    return own


def become(module: nn.Module, target: type[nn.Module]) -> None:
    """Give ``module`` the class ``target``, and leave it sharded if it is."""
    kind = type(module)
    module.__class__ = _sharded(kind, target) if _is_sharded(kind) else target


def _is_sharded(kind: type) -> bool:
    if "torch.distributed.fsdp" not in sys.modules:  # nobody can have sharded anything
        return False
    from torch.distributed.fsdp import FSDPModule

    return len(kind.__bases__) == 2 and kind.__bases__[0] is FSDPModule


_classes: dict[tuple[type, type], type[nn.Module]] = {}


def _sharded(kind: type[nn.Module], target: type[nn.Module]) -> type[nn.Module]:
    """Return the class that fully_shard would make of ``target``."""
    if (kind, target) not in _classes:
        special = {name: kind.__dict__[name] for name in ("__deepcopy__",) if name in kind.__dict__}
        _classes[kind, target] = type(f"FSDP{target.__name__}", (kind.__bases__[0], target), special)
    return _classes[kind, target]


def gather_no_more(model: nn.Module) -> None:
    """Reshard the parameters of a sharded model: a forward pass without its backward leaves them gathered."""
    for module in model.modules():
        if _is_sharded(type(module)):
            module.reshard()  # type: ignore[operator]

"""The classes of sharded modules: fully_shard gives a module a new subclass of FSDPModule and of its own class."""

from __future__ import annotations

import sys

from torch import nn


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that ``module`` had before fully_shard changed it, if it did."""
    kind = type(module)
    own: type[nn.Module] = kind.__bases__[1] if _is_sharded(kind) else kind
    return own


def become(module: nn.Module, target: type[nn.Module]) -> None:
    """Give ``module`` the class ``target``; a sharded module stays sharded."""
    kind = type(module)
    module.__class__ = _sharded(kind, target) if _is_sharded(kind) else target


def reshard(model: nn.Module) -> None:
    """Shard the parameters of a sharded model again: a forward pass without a backward leaves them gathered."""
    for module in model.modules():
        if _is_sharded(type(module)):
            module.reshard()  # type: ignore[operator]


def _is_sharded(kind: type) -> bool:
    if "torch.distributed.fsdp" not in sys.modules:  # so nothing is sharded
        return False
    from torch.distributed.fsdp import FSDPModule

    return len(kind.__bases__) == 2 and kind.__bases__[0] is FSDPModule


_classes: dict[type, type[nn.Module]] = {}  # own class -> sharded class


def _sharded(kind: type[nn.Module], target: type[nn.Module]) -> type[nn.Module]:
    """Return the class that fully_shard has made of ``target``, or would make; ``kind`` is such a class."""
    _classes[kind.__bases__[1]] = kind  # so that the way back leads to the very same class
    if target not in _classes:
        special = {name: kind.__dict__[name] for name in ("__deepcopy__",) if name in kind.__dict__}
        _classes[target] = type(f"FSDP{target.__name__}", (kind.__bases__[0], target), special)
    return _classes[target]

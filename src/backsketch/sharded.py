"""The class that a module has beneath those put over it: by fully_shard, or by a fused loss.

fully_shard gives a module a new subclass of FSDPModule and of its own class. A fused loss gives it one that a maker
under ``put_over`` made.
"""

from __future__ import annotations

import sys

from torch import nn

from .made_classes import Maker, made_of, maker_of

_put_over: set[Maker] = set()


def put_over(maker: Maker) -> Maker:
    """Let the classes that ``maker`` makes stay over a module whose own class changes."""
    _put_over.add(maker)
    return maker


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that ``module`` had before others were put over it."""
    kind = type(module)
    while (beneath := _beneath(kind)) is not None:
        kind = beneath
    return kind


def become(module: nn.Module, target: type[nn.Module]) -> None:
    """Give ``module`` the own class ``target``; what was put over its class is put over that one."""
    module.__class__ = _covered(type(module), target)


def cover(module: nn.Module, maker: Maker) -> None:
    """Put the class that ``maker`` makes over that of ``module``, unless it is there."""
    if not is_covered(module, maker):
        module.__class__ = maker(type(module))


def uncover(module: nn.Module, maker: Maker) -> None:
    """Undo ``cover``."""
    if is_covered(module, maker):
        module.__class__ = _without(type(module), maker)


def is_covered(module: nn.Module, maker: Maker) -> bool:
    """Tell whether a class of ``maker`` is over that of ``module``."""
    kind: type[nn.Module] | None = type(module)
    while kind is not None and maker_of(kind) is not maker:
        kind = _beneath(kind)
    return kind is not None


def reshard(model: nn.Module) -> None:
    """Shard the parameters of a sharded model again: a forward pass without a backward leaves them gathered."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


def is_sharded(module: nn.Module) -> bool:
    """Tell whether fully_shard was called on a module."""
    kind: type[nn.Module] | None = type(module)
    while kind is not None and not _is_sharded(kind):
        kind = _beneath(kind)
    return kind is not None


def _beneath(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the class that ``kind`` was put over, or None if it is a module's own."""
    if _is_sharded(kind):
        own: type[nn.Module] = kind.__bases__[1]
        return own
    return made_of(kind) if maker_of(kind) in _put_over else None


def _covered(kind: type[nn.Module], target: type[nn.Module]) -> type[nn.Module]:
    """Put over ``target`` what is over the own class in ``kind``."""
    beneath = _beneath(kind)
    return target if beneath is None else _over(kind, _covered(beneath, target))


def _without(kind: type[nn.Module], maker: Maker) -> type[nn.Module]:
    beneath = _beneath(kind)
    assert beneath is not None
    return beneath if maker_of(kind) is maker else _over(kind, _without(beneath, maker))


def _over(kind: type[nn.Module], beneath: type[nn.Module]) -> type[nn.Module]:
    """Return what ``kind`` is over another class than its own one."""
    maker = maker_of(kind)
    return _sharded(kind, beneath) if maker is None else maker(beneath)


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

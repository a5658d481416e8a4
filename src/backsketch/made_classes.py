"""Classes made at run time: subclasses of a module's own class with another forward, which copy and pickle know."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from types import new_class
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

from torch import nn

Kind: TypeAlias = type[nn.Module]
Maker: TypeAlias = Callable[[Kind], Kind]

_MAKER, _OWN = "_made_by", "_made_of"  # in the __dict__ of a class that was made


def one_for_each_class(make: Maker) -> Maker:
    """Let ``make``, a function of a module with a name, return the same subclass each time it gets the same class.

    A class made at run time, as for a GraphModule, goes when nobody uses it, and so does its subclass.
    """
    known: WeakKeyDictionary[Kind, ref[Kind]] = WeakKeyDictionary()

    @functools.wraps(make)
    def made(own: Kind) -> Kind:
        reference = known.get(own)
        kind = None if reference is None else reference()
        if kind is None:
            kind = make(own)
            setattr(kind, _MAKER, staticmethod(made))
            known[own] = ref(kind)
        return kind

    return made


def subclass_with_forward(own: Kind, forward: Callable[..., Any], **members: Any) -> Kind:
    """Return a subclass of ``own`` with the same name and another forward, for a maker under ``one_for_each_class``."""

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        """Refer to the class by its maker: pickle finds classes by name."""
        reduced: Any = own.__reduce_ex__(self, max(2, protocol))
        made, arguments, *others = reduced
        if made is copyreg.__newobj__ and arguments[0] is kind:  # type: ignore[attr-defined]
            return new_instance, (_recipe(kind), *arguments[1:]), *others
        return reduced

    body = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "forward": forward,
        _OWN: own,
        **members,
    }
    kind: Kind = new_class(own.__name__, (own,), exec_body=lambda namespace: namespace.update(body))
    return kind


def new_instance(recipe: Any, *arguments: Any) -> nn.Module:
    """Return an empty instance of a class that was made, which copy and pickle then fill."""
    kind: Any = _class_by(recipe)
    module: nn.Module = kind.__new__(kind, *arguments)
    return module


def _recipe(kind: Kind) -> Any:
    """Return a class, or how it was made: its maker, and the recipe of the class it was made of."""
    return (maker_of(kind), _recipe(vars(kind)[_OWN])) if maker_of(kind) is not None else kind


def _class_by(recipe: Any) -> Kind:
    if not isinstance(recipe, tuple):
        kind: Kind = recipe
        return kind
    maker, own = recipe
    made: Kind = maker(_class_by(own))
    return made


def maker_of(kind: Kind) -> Maker | None:
    """Return the function that made a class, or None for any other class."""
    held = vars(kind).get(_MAKER)
    return None if held is None else held.__func__


def made_of(kind: Kind) -> Kind:
    """Return the class of which a maker made ``kind``."""
    own: Kind = vars(kind)[_OWN]
    return own

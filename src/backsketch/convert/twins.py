"""Which layers have a sketched twin, and which are one: questions that conversion asks of a module's class."""

from __future__ import annotations

from torch import nn

from ..linear.twins import twins
from .sharded import own_class


def exact_type(module: nn.Module) -> type[nn.Module] | None:
    """Return the exact class behind a sketched layer, or None for any other module."""
    kind = own_class(module)
    return next((exact for exact, twin in twins().items() if kind is twin), None)


def is_sketched(module: nn.Module) -> bool:
    """Tell whether a layer trains from a sketch, also as a subclass that conversion leaves alone."""
    return isinstance(module, tuple(twins().values()))


def sketched_type(module: nn.Module) -> type[nn.Module] | None:
    """Return the sketched class for a layer that can be converted or already is, or None."""
    kind = own_class(module)
    return next((twin for exact, twin in twins().items() if kind in (exact, twin)), None)

"""Which layers can be sketched and which are, by their class."""

from __future__ import annotations

from torch import nn

from ..linear.twin_registry import twins
from ..sharded import own_class


def exact_type(module: nn.Module) -> type[nn.Module] | None:
    """Return the exact class behind a sketched layer, or None for any other module."""
    kind = own_class(module)
    return next((exact for exact, twin in twins().items() if kind is twin), None)


def is_sketched(module: nn.Module) -> bool:
    """Tell whether a layer trains from a sketch; subclasses of sketched layers count, though none is converted."""
    return isinstance(module, tuple(twins().values()))


def sketched_type(module: nn.Module) -> type[nn.Module] | None:
    """Return the sketched class of a layer, converted or not; None if the layer cannot be converted."""
    kind = own_class(module)
    return next((twin for exact, twin in twins().items() if kind in (exact, twin)), None)

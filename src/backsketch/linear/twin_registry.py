"""The registry of twins: exact layer class -> its sketched twin, the class that trains from a sketch of its input.

A new type of layer needs a file with a subclass of it under ``@register_twin``, and a line in ``_FILES``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from torch import nn

Twin = TypeVar("Twin", bound=type[nn.Module])

# Module that defines an exact class -> file with its twin, which is loaded only after that module has been imported.
_FILES = {"torch.nn": ".layer", "transformers.pytorch_utils": ".conv1d"}

_twins: dict[type[nn.Module], type[nn.Module]] = {}


def register_twin(exact: type[nn.Module]) -> Callable[[Twin], Twin]:
    """Register the decorated class as the one that ``sketch_`` turns ``exact`` into: a subclass with a ``config``."""

    def register(twin: Twin) -> Twin:
        _twins[exact] = twin
        return twin

    return register


def twins() -> dict[type[nn.Module], type[nn.Module]]:
    """Return exact class -> sketched class, for all classes whose module has been imported."""
    for module, file in _FILES.items():
        if module in sys.modules:
            import_module(file, __package__)
    return _twins

"""The registry of sketched twins: exact class -> the class that trains from a sketch of its input.

A new type of layer is one file with a subclass of the exact class under ``@register_twin``, and one line in ``_FILES``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from torch import nn

Twin = TypeVar("Twin", bound=type[nn.Module])

# The module that defines an exact class -> the file here with its twin, loaded once someone has imported that module.
_FILES = {"torch.nn": ".layer", "transformers.pytorch_utils": ".conv1d"}

_twins: dict[type[nn.Module], type[nn.Module]] = {}


def register_twin(exact: type[nn.Module]) -> Callable[[Twin], Twin]:
    """Make the decorated class, a subclass of ``exact`` with a ``config``, what ``sketch_`` turns it into."""

    def register(twin: Twin) -> Twin:
        _twins[exact] = twin
        return twin

    return register


def twins() -> dict[type[nn.Module], type[nn.Module]]:
    """Return exact class -> sketched class for every class that anyone can have an instance of."""
    for module, file in _FILES.items():
        if module in sys.modules:
            import_module(file, __package__)
    return _twins

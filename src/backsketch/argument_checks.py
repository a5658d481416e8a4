"""Checks of arguments: each names the argument, the value and what is allowed."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TypeGuard

from torch import nn


def check_flag(name: str, value: object) -> None:
    """Raise TypeError for what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_model(model: object) -> None:
    """Raise TypeError unless ``model`` is an nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")


def check_share(name: str, value: object) -> float:
    """Return a share of a whole, a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number in (0, 1], got {value!r}")
    share = float(value)
    if math.isnan(share) or not 0.0 < share <= 1.0:
        raise ValueError(f"{name} must be in (0, 1], got {value!r}")
    return share


def check_positive(name: str, value: object) -> int:
    """Return a positive integer."""
    if not is_integer(value):
        raise TypeError(f"{name} must be a positive integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def check_bits(name: str, value: object, allowed: tuple[int, ...]) -> int | None:
    """Return a number of bits, one of those that are allowed, or None: as it is."""
    if value is None:
        return None
    if not is_integer(value) or value not in allowed:
        raise ValueError(f"{name} must be None or one of {allowed}, got {value!r}")
    return int(value)


def is_integer(value: object) -> TypeGuard[int]:
    """Tell whether a value is a whole number, of any type of integers; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)

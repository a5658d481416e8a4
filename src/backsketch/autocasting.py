"""Autocast by device type: meta has none, and a device from outside PyTorch may have none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_on(device_type: str) -> bool:
    """Tell whether autocast is on for a type of device."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)  # for meta, asking is an error


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context in which autocast is off; nothing is entered where it is, as a device without it refuses."""
    return torch.autocast(device_type, enabled=False) if autocast_on(device_type) else nullcontext()

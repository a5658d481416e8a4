"""Check what a mask promises, that the rows it leaves out get no gradient, without waiting for an accelerator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..seeds import is_capturing
from ..torch_private import is_fake

_CHECKED_ROWS = 64  # how many masked rows an accelerator checks, to keep the check cheap
_MOST_WAITING = 8  # flags
_ALL_UNTIL, _THEN_EVERY = 256, 64  # which calls to check: a model that breaks the promise does so from the start
_MASKED = "_masked_rows"


def check_promise(valid: Tensor, y: Tensor) -> None:
    """Warn if masked rows get a gradient: valid (rows,), y (rows, out_features).

    A CPU answers at once. An accelerator sends a flag, which is read when it has arrived, a step later at the latest.
    """
    if y.is_meta or is_fake(y) or is_capturing(y.device):
        return
    if _answers_at_once(y):
        masked = _remembered(valid, lambda: (~valid).nonzero().squeeze(1))
        if bool(y.index_select(0, masked).any()):
            _warn()
        return
    _flags.read()
    if _flags.wants_another():
        _flags.send(any_masked_gradient(valid, y))


def any_masked_gradient(valid: Tensor, y: Tensor) -> Tensor:
    """Return, on the device, whether any of the checked rows has a gradient: () bool."""
    rows = _remembered(valid, lambda: valid.to(torch.uint8).topk(min(_CHECKED_ROWS, len(valid)), largest=False).indices)
    return (y.index_select(0, rows) != 0).any(1).logical_and(~valid.index_select(0, rows)).any()


@dataclass(frozen=True, slots=True)
class _Flag:
    """A bool on its way from a device to pinned memory, and an event that tells when it has arrived."""

    value: Tensor
    arrived: torch.Event

    @classmethod
    def of(cls, on_device: Tensor) -> _Flag:
        value = _room_on_the_host()
        value.copy_(on_device, non_blocking=True)
        arrived = torch.Event(device=on_device.device)
        arrived.record()
        return cls(value, arrived)


def _room_on_the_host() -> Tensor:
    """Return room for a flag, pinned so that a copy to it does not wait; a device from outside PyTorch may not pin."""
    try:
        return torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")  # whatever the default device is
    except RuntimeError:
        return torch.empty((), dtype=torch.bool, device="cpu")


class _Flags:
    """The flags that are on their way, oldest first."""

    def __init__(self) -> None:
        self._waiting: list[_Flag] = []
        self._calls = 0

    def wants_another(self) -> bool:
        """Tell whether to check this call."""
        self._calls += 1
        due = self._calls <= _ALL_UNTIL or self._calls % _THEN_EVERY == 0
        return due and len(self._waiting) < _MOST_WAITING

    def send(self, flag: Tensor) -> None:
        self._waiting.append(_Flag.of(flag))

    def read(self) -> None:
        """Read the flags that have arrived."""
        while self._waiting and self._waiting[0].arrived.query():
            if bool(self._waiting.pop(0).value):
                _warn()


_flags = _Flags()


def _answers_at_once(y: Tensor) -> bool:
    return y.is_cpu


def _remembered(valid: Tensor, find: Callable[[], Tensor]) -> Tensor:
    """Return ``find()`` for a mask, called once a mask: all layers under the mask check the same rows."""
    rows: Tensor | None = getattr(valid, _MASKED, None)
    if rows is None:
        rows = find()
        setattr(valid, _MASKED, rows)
    return rows


def _warn() -> None:
    warnings.warn(
        "rows that the mask leaves out get a gradient: their part of the weight gradient is missing. If it is from the "
        "loss, leave them out there too (labels of -100); else call backsketch.ignore_attention_mask(model)",
        RuntimeWarning,
        stacklevel=3,
    )

"""Session: convert a model for the time of a training run, watch it, and give it back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..conversion import Configs, Where, check_choice, present_configs, sketch_, unsketch_
from ..monitor import NoiseMonitor
from ..records import Record, add_up, ratios
from .peak import PeakKept


class Session:
    """One training run of a converted model: ``begin``, steps inside ``measuring`` or between ``step_begin`` and
    ``step_end``, ``end``.

    Args:
        noise_every: monitor the noise of each ``noise_every``-th step; None never does.
    """

    def __init__(self, model: nn.Module, noise_every: int | None) -> None:
        self.model = unwrapped(model)
        self._before = present_configs(self.model)
        self._records: list[Record] = []
        self._noise_every = noise_every
        self._monitor: NoiseMonitor | None = None
        self._peak: PeakKept | None = None
        self._kept: int | None = None

    def begin(self, configs: Configs | None, where: Where | None = None, step: int = 0) -> None:
        """Convert the layers, ``step`` steps after the training began."""
        sketch_(self.model, configs, where)
        if self._noise_every is not None:
            monitor = NoiseMonitor(self.model, every=self._noise_every, callback=self._records.append)
            self._monitor = monitor.start(step)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure what the step inside keeps, unless that is known since the last report."""
        self.step_begin()
        try:
            yield
        finally:
            self.step_end()

    def step_begin(self) -> None:
        """Measure what this step keeps, unless that is known since the last report."""
        if self._kept is None and self._peak is None:
            self._peak = PeakKept(self.model)
            self._peak.__enter__()

    def step_end(self) -> None:
        """Stop measuring."""
        if self._peak is not None:
            self._peak.__exit__()
            self._kept, self._peak = self._peak.bytes, None

    def report(self) -> dict[str, float]:
        """Return what was measured since the last report, under the names it is logged with."""
        report: dict[str, float] = {} if self._kept is None else {"backsketch/kept_bytes": float(self._kept)}
        if self._records:
            report["backsketch/noise"] = _ratio(self._records)
            for layer in dict.fromkeys(str(record["layer"]) for record in self._records):
                report[f"backsketch/noise/{layer}"] = _ratio([r for r in self._records if r["layer"] == layer])
        self._records.clear()
        if self._monitor is not None:
            self._monitor.forget()
        self._kept = None
        return report

    def end(self) -> None:
        """Give every layer back the class and config it had."""
        self.step_end()
        if self._monitor is not None:
            self._monitor.stop()
        unsketch_(self.model)
        if self._before:
            sketch_(self.model, self._before)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's and DDP's wrappers."""
    while isinstance(model, (DataParallel, DistributedDataParallel, torch._dynamo.OptimizedModule)):
        inner: Any = model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model.module
        model = inner
    return model


def check_arguments(configs: object, noise_every: object, where: object) -> None:
    """Raise TypeError or ValueError for what a callback cannot take, before any training."""
    check_choice(configs, where)
    is_count = isinstance(noise_every, int) and not isinstance(noise_every, bool) and noise_every > 0
    if noise_every is not None and not is_count:
        raise ValueError(f"noise_every must be a positive integer or None, got {noise_every!r}")


def _ratio(records: list[Record]) -> float:
    """Return D²_sketch / D²_SGD over the records that have both."""
    return ratios(add_up(records))["ratio"]

"""Session: convert a model for one training run, measure it, and restore it afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..config import SketchConfig
from ..control.noise_limit import NoiseLimit
from ..control.noise_schedule import NoiseSchedule
from ..convert.conversion import Configs, Where, sketch_
from ..convert.converted_state import ConvertedState
from ..convert.layer_classes import is_sketched
from ..losses.fused_models import fuse_loss_
from ..memory.saved import saved_memory
from ..monitor.noise_monitor import NoiseMonitor
from ..monitor.noise_records import Record, add_up, by_layer, ratios
from ..planning.plan_result import Plan, PlannedConfigs
from ..rest.rest_config import Rest
from ..torch_private import inside_compiled

_CONTROL_EVERY = 10  # steps between measurements for a control, unless noise_every says otherwise


class Session:
    """One training run of a converted model: ``begin``, steps, ``end``.

    In each step, call ``step_begin`` first, and then run each forward and backward pass inside ``measuring``.

    Args:
        noise_every: monitor the noise of each ``noise_every``-th step; None never does.
        noise_by_layer: report the noise of every layer too, not only of all and of the worst.
        noise_schedule: let the noise lower the learning rate of the optimizers that ``follow`` gets.
        noise_limit: hold the noise at this multiple of SGD's by what layers keep.
    """

    def __init__(
        self,
        model: nn.Module,
        noise_every: int | None,
        *,
        noise_by_layer: bool = False,
        noise_schedule: bool = False,
        noise_limit: float | None = None,
    ) -> None:
        self.model = unwrapped_model(model)
        if (unfinished := _running.pop(self.model, None)) is not None:  # an earlier run ended with an error
            _give_back(self.model, *unfinished)
        self._before = ConvertedState.of(self.model)
        self._records: list[Record] = []
        controlled = noise_schedule or noise_limit is not None
        self._noise_every = _CONTROL_EVERY if noise_every is None and controlled else noise_every
        self._noise_by_layer = noise_by_layer
        self._scales_rates = noise_schedule
        self._schedules: list[NoiseSchedule] = []
        self._noise_limit = noise_limit
        self._limit: NoiseLimit | None = None
        self._monitor: NoiseMonitor | None = None
        self._measures = False
        self._kept: int | None = None

    def begin(
        self,
        configs: Configs | None,
        where: Where | None = None,
        step: int = 0,
        *,
        checkpointed: bool = True,
        rest: Rest = None,
        fused_loss: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Convert the layers, which compute in ``autocast`` if it is given; training has made ``step`` steps before."""
        if configs is None and autocast is not None:
            configs = SketchConfig.recommended(dtype=autocast)
        if fused_loss:  # first, since it leaves the head exact
            fuse_loss_(self.model)
        try:
            sketch_(self.model, configs, where, checkpointed=checkpointed, rest=rest)
        except BaseException:
            self._before.restore(self.model)
            raise
        planned = isinstance(configs, (Plan, PlannedConfigs))  # a plan that had room for all may sketch no layer
        if self._noise_every is not None and not (planned and not any(map(is_sketched, self.model.modules()))):
            self._monitor = NoiseMonitor(self.model, every=self._noise_every, callback=self._records.append)
        _running[self.model] = self._to_restore()
        if self._monitor is not None:
            self._monitor.start(step)
            if self._noise_limit is not None:
                self._limit = NoiseLimit(self.model, self._noise_limit, monitor=self._monitor)

    def follow(self, optimizers: Iterable[Optimizer], state: Mapping[str, Any] | None = None) -> None:
        """Let the noise control the learning rates of ``optimizers``, if it is to; ``state`` is of a run to resume."""
        if self._monitor is None:
            return
        if self._scales_rates:
            self._schedules = [NoiseSchedule(optimizer, self._monitor) for optimizer in optimizers]
        state = state or {}
        for schedule, own in zip(self._schedules, state.get("schedules", ()), strict=False):
            schedule.load_state_dict(own)
        if self._limit is not None and "limit" in state:
            self._limit.load_state_dict(state["limit"])

    def step_end(self) -> None:
        """Let the controls act on what the step measured."""
        for schedule in self._schedules:
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the controls, which a resumed run continues with; empty without any."""
        state: dict[str, Any] = {}
        if self._schedules:
            state["schedules"] = [schedule.state_dict() for schedule in self._schedules]
        if self._limit is not None:
            state["limit"] = self._limit.state_dict()
        return state

    def step_begin(self) -> None:
        """Start a step; measure what it keeps, unless a step was measured since the last report."""
        self._measures = self._kept is None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure one forward and backward pass of a step, which may have several."""
        if not self._measures:
            yield
            return
        with saved_memory(self.model) as saved:
            yield
        self._kept = max(self._kept or 0, saved.most_activations)

    def report(self) -> dict[str, float]:
        """Return what was measured since the last report, under the names it is logged with."""
        report: dict[str, float] = {} if self._kept is None else {"backsketch/kept_bytes": float(self._kept)}
        if self._records:
            layers = {layer: _ratio(records) for layer, records in by_layer(self._records).items()}
            report["backsketch/noise"] = _ratio(self._records)
            report["backsketch/noise_worst"] = max(layers.values(), key=_or_least)
            if self._noise_by_layer:
                report.update({f"backsketch/noise/{layer}": value for layer, value in layers.items()})
        if factors := [factor for schedule in self._schedules for factor in schedule.factors]:
            report["backsketch/rate_factor"] = min(factors)
        if self._limit is not None:
            report["backsketch/limit_bytes"] = float(self._limit.kept_bytes)
            report["backsketch/limit_changes"] = float(len(self._limit.changes))
        self._records.clear()
        if self._monitor is not None:
            self._monitor.forget()
        self._kept = None
        return report

    def end(self) -> None:
        """Give every module back the class and config it had."""
        _running.pop(self.model, None)
        for schedule in self._schedules:
            schedule.stop()
        if self._limit is not None:
            self._limit.stop()
        _give_back(self.model, *self._to_restore())

    def _to_restore(self) -> _ToRestore:
        return self._before, None if self._monitor is None else ref(self._monitor)


_ToRestore: TypeAlias = tuple[ConvertedState, "ref[NoiseMonitor] | None"]

# Runs between begin and end. Nothing here holds a strong reference to a model.
_running: WeakKeyDictionary[nn.Module, _ToRestore] = WeakKeyDictionary()


def _give_back(model: nn.Module, before: ConvertedState, monitor: ref[NoiseMonitor] | None) -> None:
    """Stop the monitor, which its hooks keep alive, and give the modules back their classes and configs."""
    watching = None if monitor is None else monitor()
    if watching is not None:
        watching.stop()
    before.restore(model)


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's and DDP's wrappers."""
    while True:
        inner = inside_compiled(model)
        if isinstance(inner, (DataParallel, DistributedDataParallel)):
            inner = inner.module
        if inner is model:
            return model
        model = inner


def _or_least(value: float) -> float:
    """Return the value to sort by; unknown noise (nan, as for a batch of one row) comes below all other."""
    return -math.inf if math.isnan(value) else value


def _ratio(records: list[Record]) -> float:
    """Return D²_sketch / D²_SGD over the records that have both."""
    return ratios(add_up(records))["ratio"]

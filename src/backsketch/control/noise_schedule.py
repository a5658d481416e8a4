"""NoiseSchedule: a learning rate that holds the noise level of exact training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..argument_checks import check_positive, check_share
from ..convert.layer_classes import is_sketched
from ..monitor.layer_weights import weights_of
from ..monitor.noise_monitor import NoiseMonitor
from ..monitor.noise_records import Record
from .across_ranks import is_distributed, summed
from .optimizer_power import power_for
from .running_ratio import RunningRatio

_HEARD = ("sketch_variance", "sgd_variance", "energy")  # of a record


class NoiseSchedule:
    """Lower the learning rate of each parameter group by the noise that sketches add to its gradient.

    ::

        monitor = NoiseMonitor(model, every=10)
        schedule = NoiseSchedule(optimizer, monitor)
        for batch in data:
            loss(model, batch).backward()
            optimizer.step()
            schedule.step()  # beside scheduler.step() of any other scheduler, in any order
            optimizer.zero_grad()

    With r the measured ratio of added to SGD's noise, the rate is η / (1 + r) for SGD and η / √(1 + r) for
    Adam and its like, where η is **your** rate: what is in ``optimizer.param_groups``, whoever has set it. The rate is
    scaled only while ``optimizer.step()`` runs. So ``param_groups``, other schedulers and checkpoints of the optimizer
    have your own rate at all other times; ``get_last_lr`` and ``factors`` tell what is used.

    r is that of the sketched weights of a group, and holds for the whole group; a group without any keeps your rate.
    Put weights that no sketch touches in a group of their own if they are not to be slowed down. While nothing is
    measured the rates are yours, also when the monitor is stopped or a group's layers are unsketched, and they are
    never above yours. Estimates that are not finite are left out. In a
    distributed run all processes use the noise of all.

    Args:
        optimizer: an optimizer of torch.
        monitor: measures the noise; it is started if it does not run. Each ``every``-th step is enough.
        power: of 1 + r: 1 for SGD, 0.5 for Adam and its like, which is what the type of the optimizer says. Optimizers
            of an unknown type need it.
        window: over how many measured steps the noise is averaged.
        warmup: after how many measured steps the schedule acts in full; until then with a growing share of ``power``.
        least: the least factor.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        monitor: NoiseMonitor,
        *,
        power: float | None = None,
        window: int = 10,
        warmup: int = 5,
        least: float = 0.01,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be an Optimizer of torch, got {type(optimizer).__name__}")
        if not isinstance(monitor, NoiseMonitor):
            raise TypeError(f"monitor must be a NoiseMonitor, got {type(monitor).__name__}")
        self.optimizer = optimizer
        self.monitor = monitor
        self.power = power_for(optimizer, power)
        self.window = check_positive("window", window)
        self.warmup = check_positive("warmup", warmup)
        self.least = check_share("least", least)
        self._noise = [RunningRatio() for _ in optimizer.param_groups]
        self._factors = [1.0 for _ in optimizer.param_groups]
        self._heard: list[list[float]] = []
        self._calls = 0
        self._own: list[tuple[float | Tensor, float | Tensor]] = []
        monitor.start()
        self._handles = [
            optimizer.register_step_pre_hook(self._scale),
            optimizer.register_step_post_hook(self._give_back),
            monitor.listen(self._hear),
        ]

    def step(self) -> None:
        """Take the noise measured so far into account; call it after ``optimizer.step()``."""
        self._give_back()  # of a step that raised
        self._follow_groups()
        for index in self._starved():
            self._noise[index], self._factors[index] = RunningRatio(), 1.0
        call, self._calls = self._calls, self._calls + 1
        if is_distributed():
            if call % self.monitor.every:  # the processes exchange at the same calls, whatever each of them has heard
                return
            sums = self._heard or [[0.0] * len(_HEARD) for _ in self._noise]
            total = summed([value for own in sums for value in own])
            self._heard = [total[at : at + len(_HEARD)] for at in range(0, len(total), len(_HEARD))]
        if not self._heard:
            return
        for index, (added, sgd, energy) in enumerate(self._heard):
            if energy > 0:  # in units of which all steps count alike, whatever the loss scale
                self._noise[index].update(added / energy, sgd / energy, self.window)
        self._heard = []
        self._factors = [self._factor(noise, now) for noise, now in zip(self._noise, self._factors, strict=True)]

    @property
    def factors(self) -> tuple[float, ...]:
        """Return for each parameter group by how much your rate is scaled, in (0, 1].

        Groups whose rate is one tensor have one factor, the least of theirs, since it is scaled in place.
        """
        shared: dict[int, float] = {}
        for group, factor in zip(self._groups, self._factors, strict=False):
            shared[id(group["lr"])] = min(factor, shared.get(id(group["lr"]), factor))
        return tuple(
            shared[id(group["lr"])] if isinstance(group["lr"], Tensor) else factor
            for group, factor in zip(self._groups, self._factors, strict=False)
        )

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Return r of each parameter group; None where it is not known."""
        return tuple(noise.value for noise in self._noise)

    def get_last_lr(self) -> list[float]:
        """Return for each parameter group the rate of the next step: yours, scaled."""
        self._follow_groups()
        self._give_back()
        return [float(group["lr"]) * factor for group, factor in zip(self._groups, self.factors, strict=True)]

    def stop(self) -> None:
        """Scale no more. The monitor runs on."""
        self._give_back()
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, that of the monitor included, as plain numbers."""
        self._give_back()
        return {
            "noise": [noise.as_list() for noise in self._noise],
            "factors": list(self._factors),
            "heard": [list(own) for own in self._heard],
            "calls": self._calls,
            "monitor": self.monitor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another schedule was, and let the monitor continue too."""
        groups = len(self._groups)
        if len(state["noise"]) != groups:
            raise ValueError(
                f"the state must be of an optimizer with {groups} parameter groups, got one of {len(state['noise'])}"
            )
        self._noise = [RunningRatio.of(numbers) for numbers in state["noise"]]
        self._factors = [float(factor) for factor in state["factors"]]
        self._heard = [[float(value) for value in own] for own in state["heard"]]
        self._calls = int(state["calls"])
        self.monitor.load_state_dict(state["monitor"])

    def __str__(self) -> str:
        return "\n".join(f"group {index}: {self._told(index)}" for index in range(len(self._noise)))

    def _told(self, index: int) -> str:
        if (ratio := self._noise[index].value) is None:
            return "no noise measured, your own rate"
        return f"added noise / SGD's {ratio:.3g}, rate × {self.factors[index]:.3g}"

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _factor(self, noise: RunningRatio, now: float) -> float:
        """Return the factor that the noise asks for; without an estimate the one of now."""
        if (ratio := noise.value) is None:
            return now
        share = min(1.0, noise.measured / self.warmup)
        factor = (1 + ratio) ** (-self.power * share)
        return min(1.0, max(self.least, factor)) if math.isfinite(factor) else now

    def _hear(self, records: Sequence[Record]) -> None:
        """Add up the variances of a measured step by parameter group."""
        if not records:
            return
        self._follow_groups()
        self._heard = self._heard or [[0.0] * len(_HEARD) for _ in self._groups]
        group_of = self._group_of()
        for record in records:
            layer = self.monitor.layers[str(record["layer"])]
            values = [float(record[name]) for name in _HEARD]
            if all(map(math.isfinite, values)):
                for index in {group_of[id(each)] for each in weights_of(layer) if id(each) in group_of}:
                    self._heard[index] = [old + new for old, new in zip(self._heard[index], values, strict=True)]

    def _group_of(self) -> dict[int, int]:
        return {id(each): index for index, group in enumerate(self._groups) for each in group["params"]}

    def _starved(self) -> set[int]:
        """Return the groups of which nothing is measured any more: the monitor is stopped, or no sketch is left."""
        every = set(range(len(self._groups)))
        if not self.monitor.running:
            return every
        layers = list(self.monitor.layers.values())
        if all(map(is_sketched, layers)):
            return set()
        group_of = self._group_of()
        left = [each for layer in layers if is_sketched(layer) for each in weights_of(layer)]
        return every - {group_of[id(each)] for each in left if id(each) in group_of}

    def _follow_groups(self) -> None:
        """Make room for groups that were added to the optimizer."""
        for _ in range(len(self._groups) - len(self._noise)):
            self._noise.append(RunningRatio())
            self._factors.append(1.0)
            if self._heard:
                self._heard.append([0.0] * len(_HEARD))

    def _scale(self, *_: object) -> None:
        self._give_back()  # of a step that raised
        self._follow_groups()
        rates = [group["lr"] for group in self._groups]
        own = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        done: set[int] = set()
        for group, rate, factor in zip(self._groups, rates, self.factors, strict=True):
            if not isinstance(rate, Tensor):
                group["lr"] = rate * factor
            elif id(rate) not in done:  # in place, as a compiled or captured step reads this very tensor
                done.add(id(rate))
                rate.mul_(factor)
        self._own = [(before, group["lr"]) for before, group in zip(own, self._groups, strict=True)]

    def _give_back(self, *_: object) -> None:
        """Give the groups your rates back, but for those that were set anew after a step that raised."""
        own, self._own = self._own, []
        for group, (rate, scaled) in zip(self._groups, own, strict=False):
            if isinstance(scaled, Tensor):
                scaled.fill_(rate)
            elif group["lr"] == scaled:
                group["lr"] = rate

"""NoiseLimit: a controller that holds the added noise at a limit by what each layer keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from numbers import Real
from typing import Any

from torch import nn

from ..argument_checks import check_model, check_positive, check_share
from ..config import SketchConfig, check_config
from ..convert.layer_classes import is_sketched
from ..monitor.noise_monitor import NoiseMonitor
from ..monitor.noise_records import Record
from ..planning.budget import as_budget
from ..planning.step_choices import EXACT
from ..table import readable
from .across_ranks import least, summed
from .layer_averages import LayerAverages
from .limit_change import LimitChange
from .limit_choice import Group, GroupChoice, choose
from .padding_watch import PaddingWatch
from .shared_inputs import SharedInputs

_FIRST_DECISION = 3  # measured steps
_NEAR = 0.02  # noise so little above what it should be is no reason to change layers
_REPAID = 10  # measured steps in which an error of the average is made good
_FARTHEST = 0.25  # of the limit, by which the noise to aim at differs from it


class NoiseLimit:
    """Hold the added noise at ``limit`` × SGD's on average, by moving the ratio and the bits of each layer.

    ::

        sketch_(model)
        with NoiseLimit(model, limit=0.1) as controller:
            train(model)
        print(controller)

    It acts from when it is made until ``stop``, after steps of the optimizer, at most once in ``every`` steps. The
    noise of a step is that of the whole model: the sum over the layers of what their sketches add, over the sum of
    SGD's variances. What another config would add is known in closed form, so no config need be tried. Layers get the
    configs that keep the least bytes with the right noise, if the noise is too large or bytes can be saved:

    - A batch with little padding has much more noise than others. So the bytes are the least for the sum of the noise
      of a mean batch and twice that of a batch with little padding. How much padding batches have is counted in all
      steps, measured or not.
    - The right noise is ``limit`` in a mean batch, and a bit less or more, by at most a quarter, while measured steps
      since the second decision had more or less than ``limit``, so that the average over time comes to it.

    Layers that read one input get one config. If ``budget`` does not allow the limit, the layers get the configs with
    the least noise that fit it, and ``changes`` and ``print`` say so.

    Sketches must be of kind ``rows`` with ``bits``, as ``sketch_`` makes them by default. Layers inside
    ``torch.compile`` cannot be observed, and an error says so. Layers that ``unsketch_`` makes exact are left alone,
    and so are those that keep their whole input as it is, ``SketchConfig(ratio=1.0)``. In a distributed run all
    processes decide alike.

    Args:
        model: a model with layers converted by ``sketch_``.
        limit: of added noise / SGD's noise.
        every: the least number of steps between two changes; the first comes as soon as three steps are measured.
        budget: the most that inputs may keep at one time on one process: bytes, or a share of what exact layers would
            keep, as ``plan`` takes it. Micro-batches whose backward runs before the next forward are not kept at one
            time; processes count with their mean. By default what the configs of now keep.
        monitor: measures the noise; by default one that measures each tenth step, or each ``every``-th if that is less.
        window: over how many measured steps the noise is averaged.
        worst: no layer may have more than ``worst`` × ``limit`` in a mean batch, however little it counts in the sum.
        saving: the least share of the bytes for which layers are changed while the noise is below the limit.
        callback: called with each ``LimitChange``.
    """

    def __init__(
        self,
        model: nn.Module,
        limit: float = 0.1,
        every: int = 100,
        *,
        budget: str | float | int | None = None,
        monitor: NoiseMonitor | None = None,
        window: int = 10,
        worst: float = 3.0,
        saving: float = 0.02,
        callback: Callable[[LimitChange], object] | None = None,
    ) -> None:
        check_model(model)
        self.model = model
        self.limit = check_limit(limit)
        self.every = check_positive("every", every)
        self.budget = None if budget is None else as_budget(budget)
        self.window = check_positive("window", window)
        self.worst = _at_least_one("worst", worst)
        self.saving = check_share("saving", saving)
        self.callback = callback
        self.changes: list[LimitChange] = []
        self.monitor = NoiseMonitor(model, every=min(10, self.every)) if monitor is None else monitor
        _check_layers(model.named_modules())
        self._owns_monitor = monitor is None
        self.monitor.start()
        self._started = {name: layer for name, layer in self.monitor.layers.items() if _governs(layer)}
        self._averages = {name: LayerAverages() for name in self._started}
        self._first = self.configs
        self._shared = SharedInputs(self._started, lambda: self.monitor.measuring)
        self._padding = PaddingWatch(self._started, lambda name, share: self._averages[name].shares.add(share))
        self._decided: int | None = None
        self._within = True
        self._settled = False  # from the second decision on: the first knows little
        self._owed = 0.0
        self._handle = self.monitor.listen(self._hear)

    def __enter__(self) -> NoiseLimit:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Change nothing any more. Layers keep the configs they have; a monitor that was given runs on."""
        self._handle.remove()
        self._shared.stop()
        self._padding.stop()
        if self._owns_monitor:
            self.monitor.stop()

    def step(self) -> None:
        """End a step. Optimizers of torch do it on their own; other training loops call it."""
        self.monitor.step()

    @property
    def configs(self) -> dict[str, SketchConfig]:
        """Return layer -> its config of now."""
        return {name: check_config(layer.config) for name, layer in self._layers.items()}

    @property
    def noise(self) -> float | None:
        """Return the noise that is expected of the configs of now, as a multiple of SGD's; None if nothing is known."""
        choices = self._choices(self._averages)
        sgd = sum(choice.sgd for choice in choices)
        return sum(choice.now.noise for choice in choices) / sgd if sgd > 0 else None

    @property
    def kept_bytes(self) -> int:
        """Return what the layers keep at one time of a batch of mean size; 0 while nothing is known."""
        return sum(choice.now.bytes for choice in self._choices(self._averages))

    @property
    def groups(self) -> list[Group]:
        """Return the layers in groups that read one input, as far as they have run."""
        known = ((name for name in group if name in self._layers) for group in self._shared.groups())
        return [names for group in known if (names := tuple(group))]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, that of the monitor and the configs of the layers included, as plain values."""
        self._padding.settle()
        return {
            "averages": {name: self._averages[name].as_list() for name in self._layers},
            "configs": {name: asdict(config) for name, config in self.configs.items()},
            "first": {name: asdict(config) for name, config in self._first.items()},
            "groups": [list(group) for group in self.groups],
            "settled": self._settled,
            "owed": self._owed,
            "decided": self._decided,
            "within": self._within,
            "changes": [asdict(change) for change in self.changes],
            "monitor": self.monitor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another controller was: the layers get its configs."""
        if state["configs"].keys() != self._layers.keys():
            differing = sorted(state["configs"].keys() ^ self._layers.keys())
            raise ValueError(f"the state must be of a model with the same sketched layers, but differs in {differing}")
        self._padding.settle()  # what waits is of the run before
        self._averages.update((name, LayerAverages.of(numbers)) for name, numbers in state["averages"].items())
        self._set({name: SketchConfig(**fields) for name, fields in state["configs"].items()})
        self._first = {name: SketchConfig(**fields) for name, fields in state["first"].items()}
        self._shared.unite(state["groups"])
        self._decided, self._within = state["decided"], bool(state["within"])
        self._settled, self._owed = bool(state["settled"]), float(state["owed"])
        self.changes = [_change(**fields) for fields in state["changes"]]
        self.monitor.load_state_dict(state["monitor"])

    def __str__(self) -> str:
        if (noise := self.noise) is None:
            return f"limit {self.limit:.3g}: no noise measured yet"
        changes = f"{len(self.changes)} change{'' if len(self.changes) == 1 else 's'}"
        bound = "" if self._within else "; the budget does not allow the limit"
        return f"limit {self.limit:.3g}: noise {noise:.3g}, kept {readable(self.kept_bytes)}, {changes}{bound}"

    @property
    def _layers(self) -> dict[str, nn.Module]:
        return {name: layer for name, layer in self._started.items() if _governs(layer)}

    def _hear(self, records: list[Record]) -> None:
        """Take the records of a step into account, and decide if it is time."""
        _check_layers(self._layers.items())  # which sketch_ may have converted again
        self._padding.settle()
        self._shared.end_step()
        self._measure(records)
        if not self._started:
            return
        if self.monitor.unseen:
            raise RuntimeError(
                f"NoiseLimit cannot observe layers inside torch.compile or torch.func, as {self.monitor.unseen[0]}: "
                "let where of its monitor leave them out"
            )
        due = (self.monitor.steps - 1) // self.monitor.every >= _FIRST_DECISION - 1
        if due and (self._decided is None or self.monitor.steps - self._decided >= self.every):
            self._decide()

    def _measure(self, records: list[Record]) -> None:
        """Average what the layers do with SGD's noise of the step as the unit, in which all steps count alike."""
        layers = self._layers
        known = [record for record in records if record["layer"] in layers and _is_finite(record)]
        sgd = sum(float(record["sgd_variance"]) for record in known)
        if not (0 < sgd < math.inf):
            return
        for record in known:
            name = str(record["layer"])
            self._averages[name].update(record, check_config(layers[name].config), self.window, sgd)
        if self._settled and self._within:
            noise = sum(float(record["sketch_variance"]) for record in known) / sgd
            most = _REPAID * self.limit  # a single step may be an outlier
            self._owed = max(-most, min(most, self._owed + self.limit - noise))

    def _decide(self) -> None:
        self._settled, self._decided = self._decided is not None, self.monitor.steps
        averages = self._of_all_processes()
        choices = self._choices(averages)
        sgd = sum(choice.sgd for choice in choices)
        if sgd <= 0 or not math.isfinite(sgd):
            return
        now = [choice.now for choice in choices]
        before, kept = sum(point.noise for point in now) / sgd, sum(point.bytes for point in now)
        budget = self._budget(choices)
        farthest = _FARTHEST * self.limit
        aim = self.limit + max(-farthest, min(farthest, self._owed / _REPAID))
        chosen, self._within = choose(choices, noise=aim * sgd, most=self.worst * self.limit, budget=budget)
        after, size = sum(point.noise for point in chosen) / sgd, sum(point.bytes for point in chosen)
        if before > (1 + _NEAR) * aim:
            reason = "above the limit" if before > self.limit else "makes up for noise above the limit"
            if not self._within:
                reason = "above the limit, which the budget does not allow"
            if after > (1 - self.saving) * before and size >= kept:
                return  # as good as it gets
        elif size < (1 - self.saving) * kept:
            reason = "saves bytes below the limit"
        elif kept > budget:
            reason = "above the budget"
        elif not all(choice.united for choice in choices):
            reason = "one config for layers that read one input"
        else:
            return
        configs = {
            name: point.choice
            for choice, point in zip(choices, chosen, strict=True)
            for name in choice.group
            if point.choice != self._layers[name].config
        }
        self._set(configs)
        change = LimitChange(
            step=self.monitor.steps,
            reason=reason,
            noise_before=before,
            noise_after=after,
            bytes_before=kept,
            bytes_after=size,
            configs=configs,
        )
        self.changes.append(change)
        if self.callback is not None:
            self.callback(change)

    def _of_all_processes(self) -> Mapping[str, LayerAverages]:
        """Return averages over all processes; and group layers, and aim, by what all of them have seen.

        What is sent has one size, whatever a process has measured.
        """
        self._shared.follow([int(leader) for leader in least(self._shared.leaders())])
        own = [[*averages.as_list(), float(averages.measured > 0)] for averages in self._averages.values()]
        total = summed([self._owed, 1.0, *(value for numbers in own for value in numbers)])
        self._owed = total[0] / total[1]
        size = len(own[0])
        sums = (total[at : at + size] for at in range(2, len(total), size))
        return {
            name: LayerAverages.over_processes(numbers[:-1], numbers[-1])
            for name, numbers in zip(self._averages, sums, strict=True)
        }

    def _budget(self, choices: list[GroupChoice]) -> int:
        if self.budget is None:
            return sum(choice.point(self._first[choice.group[0]]).bytes for choice in choices)
        if isinstance(self.budget, int):
            return self.budget
        return int(self.budget * sum(choice.exact_bytes for choice in choices))

    def _choices(self, averages: Mapping[str, LayerAverages]) -> list[GroupChoice]:
        return [GroupChoice(group, self._layers, averages) for group in self.groups]

    def _set(self, configs: Mapping[str, SketchConfig]) -> None:
        for name, config in configs.items():
            self._layers[name].__dict__["config"] = config


def check_limit(limit: object, name: str = "limit") -> float:
    """Return a limit of added noise / SGD's noise, a positive number; ``name`` is that of the argument."""
    if isinstance(limit, bool) or not isinstance(limit, Real):
        raise TypeError(f"{name} must be a positive number, got {limit!r}")
    if not (0 < float(limit) < math.inf):
        raise ValueError(f"{name} must be a positive number, got {limit!r}")
    return float(limit)


def _at_least_one(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 1:
        raise ValueError(f"{name} must be a number of at least 1, got {value!r}")
    return float(value)


def _check_layers(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise ValueError unless the noise of all sketched layers is known under other configs."""
    for name, module in layers:
        config = module.config if _governs(module) else None
        if isinstance(config, SketchConfig) and (
            config.kind != "rows" or config.bits is None or config.center or config.dim is not None
        ):
            raise ValueError(
                f"NoiseLimit moves the ratio and bits of layers that keep rows in few bits, without a mean row: "
                f"kind='rows' with bits and ratio, got {name or 'the model'} with ({config})"
            )


def _governs(module: nn.Module) -> bool:
    """Tell whether a layer may add noise; plans give others a config that keeps their input as it is."""
    return is_sketched(module) and module.config != EXACT


def _is_finite(record: Record) -> bool:
    names = ("sketch_variance", "sgd_variance", "rounding_variance")
    return all(math.isfinite(float(record[name])) for name in names)


def _change(configs: Mapping[str, Mapping[str, Any]], **others: Any) -> LimitChange:
    return LimitChange(configs={name: SketchConfig(**fields) for name, fields in configs.items()}, **others)

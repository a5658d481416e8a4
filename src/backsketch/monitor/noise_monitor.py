"""NoiseMonitor: α, D²_SGD, D²_sketch and their ratio, layer by layer, while a model trains and without its inputs."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..argument_checks import check_model
from ..config import SketchConfig
from ..convert.conversion import Where
from ..convert.layer_classes import is_sketched
from ..linear.graph_node import after_backward, kept_by, sketch_node
from ..linear.inputs import input_of
from ..numerics import as_rows
from ..rest.packing_modules import rest_of
from ..storage.packed_tensor import PackedTensor
from .estimates import KeptInput, Trace
from .layer_weights import weights_of
from .noise_records import Record, Sums, headline, settle, table

_MOST_WAITING = 4096  # calls whose numbers may stay on the device: bounds what a long run holds there

_WHOLE = SketchConfig(ratio=1.0)  # stands for an input that is kept as it is

_WITHOUT_REST = "without the noise of everything else that the model keeps in few bits (rest), which is not measured"

_GOLDEN = 0x9E3779B97F4A7C15  # seeds of successive steps differ in about half of their bits

_OWN_STREAM = 0x2545F491  # keeps the monitor's random numbers independent of data drawn with the same seed


class NoiseMonitor:
    """Watch the noise of the sketched layers of a model.

    ::

        with NoiseMonitor(model) as monitor:
            train(model)
        print(monitor)

    It observes every backward pass through a sketched layer, and changes neither gradients nor random numbers. Between
    the passes it keeps one or two floats a row (row norms; a random feature for blocked and transform kinds), never X.
    It cannot observe layers inside ``torch.compile`` or ``torch.func``: layers that an optimizer trained unobserved are
    in ``unseen``. Nor does it see the noise of everything else that is kept in few bits (``sketch_(model, rest=...)``).
    What is printed says both. ``print(monitor)`` is one line on the whole model, ``monitor.table()`` has one a layer.

    A step ends when an optimizer that holds a monitored weight has stepped, or at ``step()``. A record is the **sum
    over the calls** of one layer in one step: micro-batches of gradient accumulation, or uses of a shared module.
    Sketches of different inputs are independent, so the sum of ``sketch_variance`` is the variance they add to the
    step's gradient, unless a layer reads the very same tensor twice; ``squared_gradient`` is Σ‖XᵀY‖² over the calls,
    not the square of their sum.

    ``squared_gradient``, ``sgd_variance`` and ``sketch_variance`` are unbiased, so a single value may be negative; it
    is recorded as it is. ``alignment``, ``ratio``, ``scaled_ratio`` and ``bound`` are ratios of the sums: consistent,
    not unbiased. A loss scale s multiplies the variances by s² and cancels in the ratios. A call with a single row has
    no ``sgd_variance``: nan.

    Args:
        model: a model with layers converted by ``sketch_``, or one such layer.
        where: called with a layer's name and the layer; False leaves it out.
        every: monitor each ``every``-th step, the first included.
        exact: keep X after all and record the exact values, for validation on a few layers.
        callback: called with each record when its step ends, for loggers.
    """

    def __init__(
        self,
        model: nn.Module,
        where: Where | None = None,
        every: int = 1,
        exact: bool = False,
        callback: Callable[[Record], object] | None = None,
    ) -> None:
        check_model(model)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a positive integer, got {every!r}")
        self.model = model
        self.where = where
        self.every = every
        self.exact = exact
        self.callback = callback
        self._steps: dict[int, dict[str, Sums]] = {}
        self._waiting: list[Sums] = []
        self._step = 0
        self._called = False
        self._seen: set[str] = set()
        self._unseen: dict[str, None] = {}
        self._layers: dict[str, nn.Module] = {}
        self._handles: list[RemovableHandle] = []
        self._listeners: OrderedDict[int, Callable[[list[Record]], object]] = OrderedDict()
        self._seed: int | None = None
        self._generators: dict[torch.device, tuple[int, torch.Generator]] = {}
        self._clock = itertools.count()  # orders the forward and backward passes of calls

    def start(self, step: int | None = None) -> NoiseMonitor:
        """Hook the sketched layers; records of an earlier run stay.

        Args:
            step: the number of the next step when training resumes; records of this and later steps are dropped. By
                default the count continues.
        """
        if self._handles:
            if step is not None:
                raise RuntimeError("the monitor is running: call stop() before start(step=...)")
            return self
        layers = {name: module for name, module in self.model.named_modules() if self._selects(name, module)}
        if not layers:
            raise ValueError("model must have a sketched layer to monitor, got none; convert it with sketch_ first")
        self._layers = {name or "(the model)": module for name, module in layers.items()}
        if self._seed is None:
            self._seed = torch.initial_seed() ^ _OWN_STREAM
        self._handles = [  # before other hooks, which may replace the output whose node is looked for
            module.register_forward_hook(partial(self._watch, name), prepend=True, with_kwargs=True)
            for name, module in self._layers.items()
        ]
        self._handles.append(register_optimizer_step_post_hook(self._after_optimizer))
        if step is not None:
            self._go_to(step)
        return self

    def stop(self) -> None:
        """End the step and remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.step()

    def __enter__(self) -> NoiseMonitor:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def step(self) -> None:
        """End a step. Optimizers do it on their own; a step in which no monitored layer ran is not counted."""
        if not self._called:
            return
        self._called = False
        ended, self._step = self._step, self._step + 1
        if self.callback is None and not self._listeners:
            if len(self._waiting) > _MOST_WAITING:
                self._settle()
            return
        records = self._records(ended)
        if self.callback is not None:
            for record in records:
                self.callback(record)
        for listener in list(self._listeners.values()) if ended % self.every == 0 else ():
            listener(records)

    def listen(self, listener: Callable[[list[Record]], object]) -> RemovableHandle:
        """Call ``listener`` with the records of each step that was measured, as it ends, until it is removed."""
        handle = RemovableHandle(self._listeners)
        self._listeners[handle.id] = listener
        return handle

    @property
    def steps(self) -> int:
        """Return how many steps have ended."""
        return self._step

    @property
    def running(self) -> bool:
        """Tell whether the layers are being watched."""
        return bool(self._handles)

    @property
    def measuring(self) -> bool:
        """Tell whether the step of now is measured."""
        return self._step % self.every == 0

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """Return name -> layer for the layers that are watched, or were until ``stop``."""
        return MappingProxyType(self._layers)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Name the layers to which an optimizer applied a gradient that was not observed."""
        return tuple(self._unseen)

    def state_dict(self) -> dict[str, int | None]:
        """Return what a resumed run needs to measure the same steps with the same random numbers, without records."""
        return {"step": self._step, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Continue where another monitor was; records of later steps are dropped."""
        step, self._seed = state["step"], state["seed"]
        assert step is not None
        self._generators.clear()
        self._go_to(step)

    def forget(self) -> None:
        """Drop the records of finished steps, which a long run with a ``callback`` no longer needs."""
        self._steps = {step: layers for step, layers in self._steps.items() if step >= self._step}

    def to_records(self) -> list[Record]:
        """Return one dict for each step and layer, layers in the order of the model."""
        return [record for step in self._steps for record in self._records(step)]

    def table(self) -> str:
        """Return the line on the whole model, and a plain table with one line a layer: variances a step, ratios."""
        return "\n\n".join((str(self), table(self.to_records()))) if self._steps else str(self)

    def __str__(self) -> str:
        notes = [] if rest_of(self.model) is None else [_WITHOUT_REST]
        if self._unseen:
            first, *others = self._unseen
            more = f" and {len(others)} more" if others else ""
            notes.append(f"without layers inside torch.compile or torch.func, which it cannot observe: {first}{more}")
        noise = headline(self.to_records()) if self._steps else "no backward pass through a sketched layer was seen"
        return "; ".join((noise, *notes))

    def _go_to(self, step: int) -> None:
        self._step = step
        self._steps = {earlier: layers for earlier, layers in self._steps.items() if earlier < step}

    def _records(self, step: int) -> list[Record]:
        self._settle()
        layers = self._steps.get(step, {})
        return [layers[name].record(step, name) for name in self._layers if name in layers]

    def _settle(self) -> None:
        settle(self._waiting)
        self._waiting = []

    def _selects(self, name: str, module: nn.Module) -> bool:
        return is_sketched(module) and (self.where is None or self.where(name, module))

    def _after_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        mine = {name: weights_of(layer) for name, layer in self._layers.items() if is_sketched(layer)}
        mine = {name: weights for name, weights in mine.items() if any(id(each) in held for each in weights)}
        for name, weights in mine.items():
            if name not in self._seen and any(weight.grad is not None for weight in weights):
                self._unseen[name] = None
                self._called = True
        if mine:
            self.step()

    @torch.no_grad()
    def _watch(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        """After a forward, attach a trace of x to the graph node of this call.

        A forward that checkpointing repeats attaches it to a node whose backward never runs, so no call counts twice.
        """
        if torch.compiler.is_compiling() or (node := sketch_node(output)) is None:
            return
        self._called = True
        self._seen.add(name)
        x = as_rows(input_of(args, kwargs).detach())
        if self.measuring and len(x):
            trace = self._trace(x, _config_of(node.how), node.valid, kept_by(node))
            sketched = isinstance(node.how, SketchConfig)
            after_backward(node, partial(self._count, self._step, name, trace, sketched, next(self._clock)))

    def _trace(
        self, x: Tensor, config: SketchConfig, valid: Tensor | None, kept: tuple[Tensor, ...] | None
    ) -> Trace | KeptInput:
        if self.exact:
            return KeptInput(x.clone(), config, valid)  # the layer does not hold x, so x may change before backward
        return Trace.of(x, config, self._generator(x.device), valid, kept)

    def _generator(self, device: torch.device) -> torch.Generator:
        """Return the monitor's own generator, so that it does not change the random numbers of training.

        What it draws in a step depends on the seed and on the number of the step alone, so that a run can resume.
        """
        step, generator = self._generators.get(device) or (-1, torch.Generator(device=device))
        if step != self._step:
            assert self._seed is not None
            generator.manual_seed((self._seed + _GOLDEN * self._step) % 2**63)
            self._generators[device] = self._step, generator
        return generator

    @torch.no_grad()
    def _count(
        self,
        step: int,
        name: str,
        trace: Trace | KeptInput,
        sketched: bool,
        begun: int,
        grad_weight: Tensor,
        grad_out: Tensor,
    ) -> None:
        """After the backward of a call, add its numbers to those of the step."""
        if not self._handles:
            return
        sums = self._steps.setdefault(step, {}).setdefault(name, Sums())
        measured = trace.measure(as_rows(grad_out), grad_weight)
        sums.add(trace.blocks, trace.rows, trace.valid_rows, sketched, measured)
        sums.passes.append((begun, next(self._clock)))
        self._waiting.append(sums)


def _config_of(how: SketchConfig | PackedTensor | None) -> SketchConfig:
    """Return the config that adds the same noise as how a layer keeps its input."""
    if isinstance(how, PackedTensor):
        return SketchConfig(ratio=1.0, bits=how.memory.bits, rotate=how.memory.rotated)
    return how or _WHOLE

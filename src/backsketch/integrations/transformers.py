"""SketchCallback for the Trainer of transformers: converts when training begins, logs, and restores when it ends."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import wraps
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from ..config import SketchConfig
from ..convert.conversion import Configs, Where
from ..planning.budget import as_budget
from ..planning.planner import plan
from ..torch_private import tree_map_only
from .session import Session, check_arguments, unwrapped

Sender = TypeVar("Sender", Trainer, CallbackHandler)

_PLAN = "backsketch/plan"  # not the callback's name, under which the Trainer would make another one from it


class SketchCallback(TrainerCallback):  # type: ignore[misc]
    """Train the linear layers of a Trainer's model from sketches: ``Trainer(..., callbacks=[SketchCallback()])``.

    The model is converted in place when training begins and is what it was when training ends; checkpoints are those of
    an unconverted model. Every log of the Trainer also has, for all its loggers, ``backsketch/kept_bytes``, the most
    that autograd held for backward in a step, and with ``noise_every`` the variance that the sketches add, as a
    multiple of the gradient's own: ``backsketch/noise`` of the whole model, ``backsketch/noise_worst`` of the layer
    with most.

    Args:
        config: as ``sketch_`` takes it.
        budget: as ``plan`` takes it; the layers' configs are then planned on the first batch of the training data,
            saved with every checkpoint, and taken from there when training resumes. With ``config``, that one's kind.
        noise_every: monitor the noise of each ``noise_every``-th step. Compiled layers cannot be monitored.
        noise_by_layer: log the noise of every layer too, as ``backsketch/noise/<layer>``: as many entries as layers.
        where, checkpointed: as ``sketch_`` takes them.
    """

    def __init__(
        self,
        config: Configs | None = None,
        *,
        budget: str | float | int | None = None,
        noise_every: int | None = None,
        noise_by_layer: bool = False,
        where: Where | None = None,
        checkpointed: bool = True,
    ) -> None:
        if budget is not None and not (config is None or isinstance(config, SketchConfig)):
            raise ValueError("config must be a single SketchConfig when budget plans the others")
        check_arguments(config, noise_every, where, noise_by_layer, checkpointed)
        if budget is not None:
            as_budget(budget)
        self.config = config
        self.budget = budget
        self.noise_every = noise_every
        self.noise_by_layer = noise_by_layer
        self.checkpointed = checkpointed
        self.where = where
        self.planned: dict[str, dict[str, Any] | None] | None = None
        self._session: Session | None = None
        self._unguard: Callable[[], None] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Convert the model."""
        self._end()  # of an earlier run that broke off
        if self.noise_every is not None and args.torch_compile:
            raise ValueError("noise_every must be None with torch_compile=True: compiled layers cannot be monitored")
        _before_the_loggers(self)
        model = unwrapped(kwargs["model"])
        if self.budget is not None:
            resumed = state.stateful_callbacks.get(_PLAN) if state.global_step else None
            self.planned = resumed or self._plan(model, kwargs["train_dataloader"], args)
            state.stateful_callbacks[_PLAN] = self.planned  # which every checkpoint keeps
        self._session = Session(model, self.noise_every, noise_by_layer=self.noise_by_layer)
        self._session.begin(self._configs(), self.where, state.global_step, checkpointed=self.checkpointed)
        if (trainer := _sender(Trainer)) is not None:
            self._guard(trainer)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure what the first step after a log keeps."""
        if self._session is not None:
            self._session.step_begin()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add what was measured to what the Trainer logs."""
        if self._session is not None and logs is not None and "loss" in logs:
            report = self._session.report()
            logs.update(report)
            if state.log_history:
                state.log_history[-1].update(report)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the model back as it was."""
        self._end()

    def _guard(self, trainer: Trainer) -> None:
        """Put forward and backward of each step inside what measures it and cleans up after an exception.

        Not between two events: the Trainer has none for a step that breaks off.
        """
        step, before = trainer.training_step, vars(trainer).get("training_step")

        @wraps(step)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._session is None:
                return step(*args, **kwargs)
            try:
                with self._session.measuring():
                    return step(*args, **kwargs)
            except BaseException:
                self._end()
                raise

        def unguard() -> None:
            if before is None:
                del trainer.training_step
            else:
                trainer.training_step = before

        trainer.training_step = guarded
        self._unguard = unguard

    def _end(self) -> None:
        session, self._session = self._session, None
        unguard, self._unguard = self._unguard, None
        if unguard is not None:
            unguard()
        if session is not None:
            session.end()

    def _configs(self) -> Configs | None:
        if self.planned is None:
            return self.config
        return {name: None if fields is None else SketchConfig(**fields) for name, fields in self.planned.items()}

    def _plan(self, model: nn.Module, dataloader: Any, args: TrainingArguments) -> dict[str, dict[str, Any] | None]:
        assert self.budget is not None
        batch = _first_batch(dataloader, args.per_device_train_batch_size, next(model.parameters()).device)
        config = self.config if isinstance(self.config, SketchConfig) else None
        planned: Mapping[str, SketchConfig | None] = plan(
            model, budget=self.budget, config=config, where=self.where, **batch
        )
        return {name: None if chosen is None else asdict(chosen) for name, chosen in planned.items()}


def _first_batch(dataloader: Any, size: int, device: torch.device) -> dict[str, Any]:
    """Return the first ``size`` samples as a batch, without a step of the sampler or of a random generator."""
    dataset = dataloader.dataset
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__"):  # which need not end by itself
        dataset = map(dataset.__getitem__, range(len(dataset)))
    with torch.random.fork_rng(devices=[]):
        batch = dataloader.collate_fn(list(itertools.islice(dataset, size)))
    return dict(tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), dict(batch)))


def _before_the_loggers(callback: TrainerCallback) -> None:
    """Move a callback to the front of its handler's list, so that what it adds to a log reaches every logger."""
    handler = _sender(CallbackHandler)
    if handler is not None and callback in handler.callbacks:
        if sum(isinstance(each, SketchCallback) for each in handler.callbacks) > 1:
            raise ValueError("a Trainer takes one SketchCallback: a mapping as its config can say what two would")
        handler.callbacks.remove(callback)
        handler.callbacks.insert(0, callback)


def _sender(kind: type[Sender]) -> Sender | None:
    """Find on the stack the Trainer or handler that sends the event: an event has no reference to it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), kind):
            return found
        frame = frame.f_back
    return None

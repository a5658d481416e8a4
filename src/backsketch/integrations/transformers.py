"""SketchCallback for the Trainer of transformers: converts when training begins, logs, and restores when it ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..convert.conversion import Configs, Where
from ..rest.rest_config import Rest
from .run_plan import configs_of, first_batch, plan_run
from .run_settings import RunSettings
from .session import Session, unwrapped_model

_TOTAL_PLAN = "backsketch/total_plan"
_PLAN = "backsketch/plan"  # not the callback's name, under which the Trainer would make another one from it
_CONTROL = "backsketch/control"
_ONE_CALLBACK = "a Trainer takes one SketchCallback: a mapping as its config can say what two would"


class SketchCallback(TrainerCallback):  # type: ignore[misc]
    """Train the linear layers of a Trainer's model from sketches: ``Trainer(..., callbacks=[SketchCallback()])``.

    The model is converted in place when training begins and is what it was when training ends; checkpoints are those of
    an unconverted model. Every log of the Trainer also has ``backsketch/kept_bytes``, the most that autograd held for
    backward in a step, and with ``noise_every`` the variance that the sketches add, as a multiple of the gradient's
    own: ``backsketch/noise`` of the whole model, ``backsketch/noise_worst`` of the layer with most.

    A callback is not told of an exception, and comes after the loggers of ``report_to``: ``attach`` sees to both.

    Args:
        config: as ``sketch_`` takes it. By default ``SketchConfig.recommended()`` for the type in which layers compute,
            with ``bf16=True`` bfloat16.
        budget: as ``plan`` takes it; the layers' configs are then planned on the first batch of the training data,
            saved with every checkpoint, and taken from there when training resumes. With ``config``, that one's kind.
        peak: as ``plan`` takes it, with the states of the Trainer's optimiser: the whole step is then planned on the
            first batch, saved and resumed as under ``budget``. The plan says what ``rest`` is.
        optimizer: whose states ``peak`` counts, as ``plan`` takes it; by default that of the Trainer.
        noise_every: monitor the noise of each ``noise_every``-th step. Compiled layers cannot be monitored.
        noise_by_layer: log the noise of every layer too, as ``backsketch/noise/<layer>``: as many entries as layers.
        noise_schedule: let the noise lower the learning rate (``NoiseSchedule``); ``backsketch/rate_factor`` is the
            least factor of all parameter groups. It monitors each tenth step, unless ``noise_every`` says otherwise.
        noise_limit: hold the noise at this multiple of SGD's by what layers keep (``NoiseLimit``), which is logged as
            ``backsketch/limit_bytes``. Monitors as ``noise_schedule`` does.
        where, checkpointed, rest: as ``sketch_`` takes them.
        fused_loss: also compute the loss without logits of all rows at once, as ``fuse_loss_`` does.
    """

    def __init__(
        self,
        config: Configs | None = None,
        *,
        budget: str | float | int | None = None,
        peak: str | float | int | None = None,
        optimizer: str | None = None,
        noise_every: int | None = None,
        noise_by_layer: bool = False,
        noise_schedule: bool = False,
        noise_limit: float | None = None,
        where: Where | None = None,
        checkpointed: bool = True,
        rest: Rest = None,
        fused_loss: bool = False,
    ) -> None:
        self.settings = RunSettings(
            config=config,
            budget=budget,
            peak=peak,
            optimizer=optimizer,
            noise_every=noise_every,
            noise_by_layer=noise_by_layer,
            noise_schedule=noise_schedule,
            noise_limit=noise_limit,
            where=where,
            checkpointed=checkpointed,
            rest=rest,
            fused_loss=fused_loss,
        )
        self.planned: dict[str, Any] | None = None
        self._session: Session | None = None
        self._state: TrainerState | None = None
        self._measuring = ExitStack()
        self._trainers: WeakSet[Trainer] = WeakSet()

    def attach(self, trainer: Trainer) -> SketchCallback:
        """Add the callback to a Trainer, unless it has it, so that it serves every logger and every exception.

        ``SketchCallback().attach(trainer)`` puts it before the loggers, which then get all that it logs, and lets an
        exception in ``trainer.train()``, also a KeyboardInterrupt, give the model back as it was. Without it the
        entries are in ``trainer.state.log_history`` and reach the callbacks that come later, and after an exception
        the model stays converted and its memory measured until a callback trains it again.
        """
        callbacks = trainer.callback_handler.callbacks
        if any(isinstance(each, SketchCallback) and each is not self for each in callbacks):
            raise ValueError(_ONE_CALLBACK)
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        if trainer not in self._trainers:
            self._trainers.add(trainer)
            trainer.train = self._ending(trainer.train)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Convert the model."""
        self._end()  # of an earlier run that broke off
        settings = self.settings
        if args.torch_compile:
            _check_compiled(settings)
        if settings.fused_loss and args.label_smoothing_factor:
            warnings.warn(
                "fused_loss has no effect with label_smoothing_factor: the Trainer computes that loss from logits",
                stacklevel=2,
            )
        self._begin(state)
        model = unwrapped_model(kwargs["model"])
        autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        optimizers = [_inner(each) for each in [kwargs.get("optimizer")] if each is not None]
        if settings.planned:
            name = _PLAN if settings.peak is None else _TOTAL_PLAN
            self.planned = state.stateful_callbacks.get(name) if state.global_step else None
            if self.planned is None:
                device = next(model.parameters()).device
                batch = first_batch(kwargs["train_dataloader"], args.per_device_train_batch_size, device)
                self.planned = plan_run(settings, model, (), dict(batch), optimizers, autocast)
            state.stateful_callbacks[name] = self.planned  # which every checkpoint keeps
        configs = configs_of(settings, self.planned)
        self._session = settings.session(model, configs, step=state.global_step, autocast=autocast)
        try:
            if optimizers:
                self._session.follow(optimizers, state.stateful_callbacks.get(_CONTROL) if state.global_step else None)
        except BaseException:
            self._end()
            raise

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure what the first step after a log keeps."""
        if self._session is not None:
            self._measuring.close()
            self._session.step_begin()
            self._measuring.enter_context(self._session.measuring())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop measuring: all passes of the step are done."""
        self._measuring.close()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Let the controls act, and note their state, which every checkpoint keeps."""
        if self._session is not None:
            self._session.step_end()
            if controls := self._session.state_dict():
                state.stateful_callbacks[_CONTROL] = controls

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

    def _ending(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Return a Trainer's ``train`` with an end of the session whatever it raises."""

        @wraps(train)
        def ending(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                self._end()

        return ending

    def _begin(self, state: TrainerState) -> None:
        """Take note of the run by its state, which is one object for all callbacks of a run."""
        for other in [each for each in _in_training if each is not self]:
            other._measuring.close()  # no training begins inside a step of another: that one broke off
            if other._state is state:
                other._end()
                raise ValueError(_ONE_CALLBACK)
        self._state = state
        _in_training.add(self)

    def _end(self) -> None:
        self._measuring.close()
        self._state = None
        _in_training.discard(self)
        session, self._session = self._session, None
        if session is not None:
            session.end()


def _check_compiled(settings: RunSettings) -> None:
    """Refuse what cannot be done with ``torch_compile=True``, and warn of what does nothing there."""
    if settings.controlled:
        raise ValueError(
            "noise_schedule and noise_limit cannot be used with torch_compile=True: compiled layers cannot be monitored"
        )
    if settings.noise_every is not None:
        raise ValueError("noise_every must be None with torch_compile=True: compiled layers cannot be monitored")
    if settings.rest is not None:
        warnings.warn("rest has no effect on what torch_compile=True compiles: sketches alone do", stacklevel=3)
    if settings.fused_loss:
        raise ValueError("fused_loss must be False with torch_compile=True, which compiles the model as a whole")


def _inner(optimizer: Any) -> Optimizer:
    """Return the optimizer of torch inside accelerate's wrapper."""
    inner: Optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return inner


_in_training: WeakSet[SketchCallback] = WeakSet()  # from the beginning of a run to its end, if it has one

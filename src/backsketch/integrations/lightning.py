"""SketchCallback for Lightning: converts before the strategy sets the model up, logs, and restores after the fit."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from ..convert.conversion import Configs, Where
from ..rest.rest_config import Rest
from .lightning_plan import plan_fit
from .run_plan import configs_of
from .run_settings import RunSettings
from .session import Session

_PLAN = "plan"
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class SketchCallback(Callback):  # type: ignore[misc]
    """Train the linear layers of a LightningModule from sketches: ``Trainer(callbacks=[SketchCallback()])``.

    The callback converts the module in place when a fit is set up, and restores it at teardown. Checkpoints are those
    of an unconverted module. Every ``log_every_n_steps`` steps, all loggers get ``backsketch/kept_bytes``, the most
    that autograd held for backward in a step. With ``noise_every`` they also get the variance that the sketches add, as
    a multiple of the gradient's own: ``backsketch/noise`` of the model, ``backsketch/noise_worst`` of the noisiest
    layer.

    Args:
        config: as ``sketch_`` takes it. By default ``SketchConfig.recommended()`` for the type in which layers compute,
            with "bf16-mixed" bfloat16.
        budget: as ``plan`` takes it; the layers' configs are then planned on the first batch of the training data, when
            training starts, saved with every checkpoint, and taken from there when it resumes.
        peak: as ``plan`` takes it, with the states of the optimizers: the whole step is then planned, saved and resumed
            as under ``budget``. The plan says what ``rest`` is.
        optimizer: whose states ``peak`` counts, as ``plan`` takes it; by default that of the module.
        noise_every: monitor the noise of each ``noise_every``-th step. It cannot measure compiled layers.
        noise_by_layer: log the noise of every layer too, as ``backsketch/noise/<layer>``.
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
        self._measuring = ExitStack()
        self._logged = 0
        self._steps = 0
        self._resumed: dict[str, Any] = {}
        self._last: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Convert the module, before any strategy wraps or shards it, unless a plan needs a batch."""
        if stage == "fit":
            self._end()
            self.planned = None
            self._resumed, self._last = {}, {}  # a checkpoint that was validated is none to continue from
            if not self.settings.planned:
                self._begin(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan if asked, and let the controls follow the optimizers; a checkpoint has the states of both."""
        self._steps = trainer.global_step
        optimizers = [_inner(optimizer) for optimizer in trainer.optimizers]
        if self.settings.planned:
            self.planned = self._resumed.get(_PLAN)
            if self.planned is None:
                self.planned = plan_fit(self.settings, trainer, pl_module, optimizers, _autocast(trainer))
            self._begin(trainer, pl_module)
        if self._session is not None:
            self._session.follow(optimizers, self._resumed)
        self._resumed = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and the state of the controls, after a fit that at its end; checkpoints have both."""
        state = self._last if self._session is None else self._session.state_dict()
        return state if self.planned is None else {**state, _PLAN: self.planned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Note the state of a checkpoint until the optimizers are there."""
        self._resumed = dict(state_dict)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measure what the first step after a log keeps."""
        if self._session is not None:
            self._session.step_begin()
            self._measuring.enter_context(self._session.measuring())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop measuring, and log when the trainer does."""
        if self._session is None:
            return
        self._measuring.close()
        if trainer.global_step != self._steps:  # not a micro-batch that only adds to the gradient
            self._steps = trainer.global_step
            self._session.step_end()
        step, every = trainer.global_step, trainer.log_every_n_steps
        if every and step % every == 0 and step != self._logged:  # micro-batches of one step report once
            self._logged = step
            report = self._session.report()
            for logger in trainer.loggers:
                logger.log_metrics(report, step=step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the module back as it was also when training breaks off."""
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the module back as it was."""
        if stage == "fit":
            self._end()

    def _begin(self, trainer: Trainer, module: LightningModule) -> None:
        configs = configs_of(self.settings, self.planned)
        self._session = self.settings.session(module, configs, autocast=_autocast(trainer))

    def _end(self) -> None:
        self._measuring.close()
        if self._session is not None:
            self._last = self._session.state_dict()
            self._session.end()
            self._session = None


def _inner(optimizer: Any) -> Optimizer:
    """Return the optimizer of torch inside Lightning's wrapper."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _autocast(trainer: Trainer) -> torch.dtype | None:
    return _AUTOCAST.get(str(trainer.precision))

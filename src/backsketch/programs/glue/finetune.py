"""finetune: one run on a GLUE task, from its settings to its record."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    DataCollatorWithPadding,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from ...integrations.run_plan import configs_of
from ...integrations.transformers import SketchCallback
from ...masks.attention_mask import ignore_attention_mask
from ..result_files import finite, write_json, write_record
from .curves import curves, most_kept, noise
from .folder import (
    LOG,
    MODEL,
    NOISE,
    RECORD,
    TENSORBOARD,
    begin,
    check_place,
    finished,
    forget_checkpoints,
    forget_earlier,
    last_checkpoint,
    leave,
    owned,
    step_of,
)
from .loading import check_exclude, check_length, encode, load
from .metrics import evaluate
from .noise_log import NoiseLog
from .reading import Examples, read_task
from .settings import Settings
from .step_memory import largest_batch, step_memory
from .watch import Clock, EvaluateAtEnd, LogEpochs, Progress, StopOnSignal

_PACKAGES = ("transformers", "accelerate", "numpy", "scikit-learn", "scipy")
_LOGS, _NOISE_LOGS = 200, 50


class Interrupted(Exception):  # noqa: N818 (not an error: the run was asked to stop)
    """A run was stopped and can be continued."""


def finetune(
    settings: Settings,
    out: Path,
    *,
    overwrite: bool = False,
    progress: bool = False,
    callbacks: tuple[TrainerCallback, ...] = (),
) -> dict[str, Any]:
    """Fine-tune, write ``out/record.json``, and return the record.

    Called again with the same settings and ``out``, it continues a run that was stopped, or returns the record of a
    finished run. A continued run makes the same steps as one that was never stopped; only its loss curve has one more
    point, where it stopped.

    Args:
        overwrite: start again, and discard an earlier run in ``out`` once the first step is made.
        progress: show a bar on stderr.
        callbacks: further callbacks for the Trainer.
    """
    return prepare(settings, out, overwrite=overwrite)(progress=progress, callbacks=callbacks)


def prepare(settings: Settings, out: Path, *, overwrite: bool = False) -> Callable[..., dict[str, Any]]:
    """Load all that a run needs, and return a function that runs it. All mistakes of a user raise ValueError here.

    Only the returned function changes ``out``.
    """
    check_place(out)
    with owned(out):
        record = finished(settings, out, overwrite)
    if record is not None:
        return lambda **_: record
    task = settings.the_task
    train, *devs = read_task(task, settings.data)
    train, devs = train.subset(settings.train_rows), [dev.subset(settings.eval_rows) for dev in devs]
    _check_devices()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    set_seed(settings.seed)
    model, tokenizer = load(settings)
    check_exclude(settings, model)
    check_length(settings, tokenizer)
    ignore_attention_mask(model, settings.ignore_mask)
    return _Run(settings, out, overwrite, model, tokenizer, train, devs)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run with everything loaded."""

    settings: Settings
    out: Path
    overwrite: bool
    model: nn.Module
    tokenizer: Any
    train: Examples
    devs: list[Examples]

    def __call__(self, *, progress: bool = False, callbacks: tuple[TrainerCallback, ...] = ()) -> dict[str, Any]:
        with owned(self.out):
            record = finished(self.settings, self.out, self.overwrite)
            if record is not None:  # another process has finished it meanwhile
                return record
            described = self.settings.describe()
            begin(described, self.out, self.overwrite)
            return self._run(described, progress, callbacks)

    def _run(self, described: dict[str, Any], progress: bool, callbacks: tuple[TrainerCallback, ...]) -> dict[str, Any]:
        settings, task = self.settings, self.settings.the_task
        checkpoint, trainer = last_checkpoint(self.out), None
        steps = settings.max_steps or settings.the_recipe.steps(len(self.train))
        noise_every = max(1, steps // _NOISE_LOGS) if settings.noise_every is None else settings.noise_every
        sketch = None
        if settings.config is not None:
            where = lambda name, module: not settings.excluded(name)  # noqa: E731
            sketch = SketchCallback(
                settings.config,
                budget=settings.budget,
                rest=settings.rest,
                noise_every=noise_every or None,
                noise_by_layer=noise_every > 0,  # the record has the mean of every layer
                noise_schedule=settings.noise_schedule,
                where=where,
            )
        noise_log = NoiseLog(self.out / NOISE, settings.noise_layers, noise_every) if settings.noise_layers else None
        sketching = [each for each in (sketch, noise_log) if each is not None]  # conversion first
        clock, stop = Clock(noise_every if sketch else None), StopOnSignal()
        try:
            with _tensorboard(self.out / TENSORBOARD, checkpoint) as board:
                trainer = self._trainer(steps, [*sketching, *board, clock, LogEpochs(), stop, *callbacks])
                if sketch is not None:
                    sketch.attach(trainer)
                if settings.eval_every is not None:
                    trainer.add_callback(EvaluateAtEnd())
                trainer.remove_callback(PrinterCallback)
                trainer.remove_callback(ProgressCallback)
                if progress:
                    trainer.add_callback(Progress())
                with stop:
                    _train(trainer, steps, checkpoint)
        except BaseException:
            if checkpoint is None and (trainer is None or trainer.state.global_step == 0):
                leave(self.out)
            raise
        forget_earlier(self.out)
        log, state = trainer.state.log_history, trainer.state
        if stop.stopped:
            how = "the same command without --overwrite" if self.overwrite else "the same command"
            raise Interrupted(f"stopped after step {state.global_step} of {steps}; {how} continues")
        write_json(self.out / LOG, [finite(entry) for entry in log])
        learned = curves(log, task)
        scores = [point["score"] for point in learned["eval"] if point["score"] is not None]
        seconds = clock.step_seconds()
        results = {
            "score": learned["eval"][-1]["score"],
            "best_score": max(scores, default=None),
            "metrics": {name: learned["eval"][-1][name] for name in task.all_metrics},
            "steps": state.global_step,
            "resumed_from_step": None if checkpoint is None else step_of(checkpoint),
            "examples": {
                "train": len(self.train),
                "eval": sum(map(len, self.devs)),
                "skipped": sum(examples.skipped for examples in (self.train, *self.devs)),
            },
            "curves": learned,
            "planned": None if sketch is None else sketch.planned,
            "noise": {**noise(log), "records": [] if noise_log is None else noise_log.records()},
            "memory": {**self._memory(sketch), "most_kept_bytes_while_training": most_kept(log)},
            "throughput": {
                "step_seconds": seconds,
                "samples_per_second": settings.the_recipe.mean_batch(len(self.train)) / seconds if seconds else None,
            },
        }
        if settings.save_model:
            trainer.save_model(str(self.out / MODEL))
        write_record(self.out / RECORD, settings=described, results=results, packages=_PACKAGES)
        forget_checkpoints(self.out)
        record: dict[str, Any] = json.loads((self.out / RECORD).read_text())
        return record

    def _trainer(self, steps: int, callbacks: list[TrainerCallback]) -> Trainer:
        recipe, task, sizes = self.settings.the_recipe, self.settings.the_task, [len(dev) for dev in self.devs]
        arguments = TrainingArguments(
            output_dir=str(self.out),
            per_device_train_batch_size=recipe.batch_size,
            per_device_eval_batch_size=64,
            learning_rate=recipe.learning_rate,
            num_train_epochs=recipe.epochs,
            max_steps=self.settings.max_steps or -1,
            warmup_steps=int(recipe.warmup * steps),
            lr_scheduler_type="polynomial",
            lr_scheduler_kwargs={"lr_end": 0.0, "power": recipe.power},
            adam_beta1=recipe.beta1,
            adam_beta2=recipe.beta2,
            adam_epsilon=recipe.epsilon,
            weight_decay=recipe.weight_decay,
            optim="adamw_torch_fused",
            max_grad_norm=recipe.clip,
            seed=self.settings.seed,
            eval_strategy="epoch" if self.settings.eval_every is None else "steps",
            eval_steps=self.settings.eval_every,
            save_strategy="epoch",
            save_total_limit=1,
            logging_steps=max(1, steps // _LOGS),
            logging_nan_inf_filter=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            report_to="none",
            log_level="error",
        )
        return Trainer(
            self.model,
            arguments,
            data_collator=DataCollatorWithPadding(self.tokenizer),
            train_dataset=self._encoded(self.train),
            eval_dataset=[example for dev in self.devs for example in self._encoded(dev)],
            compute_metrics=lambda outcome: evaluate(task, _logits(outcome.predictions), outcome.label_ids, sizes),
            callbacks=callbacks,
        )

    def _encoded(self, examples: Examples) -> list[dict[str, Any]]:
        return encode(examples, self.model, self.tokenizer, self.settings.the_recipe.max_length)

    def _memory(self, sketch: SketchCallback | None) -> dict[str, Any]:
        """Measure a step on the longest examples: the batch at which a run peaks."""
        batch = largest_batch(self._encoded(self.train), self.tokenizer, self.settings.the_recipe.batch_size)
        configs = None if sketch is None else configs_of(sketch.settings, sketch.planned)
        where = lambda name, module: not self.settings.excluded(name)  # noqa: E731
        return step_memory(self.model, batch, configs, where, self.settings.rest)


def _train(trainer: Trainer, steps: int, checkpoint: Path | None) -> None:
    """Train from the checkpoint on, if there is one."""
    if checkpoint is None or step_of(checkpoint) < steps:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return
    # The last step is already made. train() would make one more if that step does not end an epoch.
    trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    trainer.model.load_state_dict(type(trainer.model).from_pretrained(checkpoint).state_dict())
    for event in (trainer.callback_handler.on_train_begin, trainer.callback_handler.on_train_end):
        event(trainer.args, trainer.state, trainer.control)


def _check_devices() -> None:
    """Raise ValueError if the Trainer would use several devices, which multiplies the batch."""
    processes, gpus = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.device_count()
    if processes > 1:
        raise ValueError(f"finetune trains in one process, got WORLD_SIZE={processes}: start it without a launcher")
    if gpus > 1:
        raise ValueError(f"finetune trains on one GPU, got {gpus}: choose one with CUDA_VISIBLE_DEVICES=0")


@contextmanager
def _tensorboard(folder: Path, checkpoint: Path | None) -> Iterator[list[TrainerCallback]]:
    """Yield the callback that logs to TensorBoard, if installed. What was logged after the checkpoint is removed.

    When the block ends, its log files are closed, however training ended.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield []
        return
    from transformers.integrations import TensorBoardCallback

    begins = None if checkpoint is None else step_of(checkpoint) + 1
    with SummaryWriter(str(folder), purge_step=begins) as writer:
        yield [TensorBoardCallback(writer)]


def _logits(predictions: Any) -> Any:
    """Return the logits; some models return more beside them."""
    return predictions[0] if isinstance(predictions, tuple) else predictions

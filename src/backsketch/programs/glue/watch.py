"""Callbacks of a Trainer's run: progress, timing, evaluation at the end, and stopping on a signal."""

from __future__ import annotations

import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, ProgressCallback


class Progress(ProgressCallback):  # type: ignore[misc]
    """Show a bar with the loss, and a line for each evaluation, on stderr."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Show the loss beside the bar, instead of all that is logged."""
        if self.training_bar is None or logs is None:
            return
        if "loss" in logs:
            self.training_bar.set_postfix({"loss": f"{float(logs['loss']):.3f}"})
        if "eval_score" in logs:
            named = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
            shown = [f"{name} {value:.4f}" for name, value in named.items() if name not in _UNSHOWN]
            self.training_bar.write(f"epoch {logs.get('epoch', 0):.2f}: {', '.join(shown)}", file=sys.stderr)


_UNSHOWN = {"runtime", "samples_per_second", "steps_per_second", "model_preparation_time"}


class Clock(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Time the steps of a run, without evaluation and saving; checkpoints save the times for a run that continues.

    Args:
        noise_every: how often noise is monitored; such steps are slower, and are timed apart.
    """

    def __init__(self, noise_every: int | None) -> None:
        self._times: dict[str, list[float]] = {kind: [0.0, 0] for kind in _STEPS}
        self._noise_every = noise_every
        self._is_first = True
        self._began = 0.0

    def state(self) -> dict[str, Any]:
        """Return the sum and count of each kind of step, as a checkpoint keeps them."""
        return {"args": {"noise_every": self._noise_every}, "attributes": {"_times": self._times}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take up the times of the checkpoint that training resumes from."""
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        if saved:
            self._times = {kind: list(saved["attributes"]["_times"][kind]) for kind in _STEPS}

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock and add the time to its kind of step."""
        seconds = time.perf_counter() - self._began
        watched = self._noise_every and (state.global_step - 1) % self._noise_every == 0
        kind = "first" if self._is_first else "watched" if watched else "plain"
        self._times[kind][0] += seconds
        self._times[kind][1] += 1
        self._is_first = False

    def step_seconds(self) -> float | None:
        """Return the mean time of a plain step; if there is none, of a monitored one, or else of the first step."""
        times = (self._times[kind] for kind in _STEPS)
        return next((seconds / count for seconds, count in times if count), None)


_STEPS = ("plain", "watched", "first")


class LogEpochs(TrainerCallback):  # type: ignore[misc]
    """Log at the end of each epoch, so that no part of the loss is missing from a checkpoint."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask the Trainer to log."""
        control.should_log = True


class EvaluateAtEnd(TrainerCallback):  # type: ignore[misc]
    """Evaluate after the last step, whatever its number."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask the Trainer to evaluate, after the last step."""
        if state.global_step >= state.max_steps:
            control.should_evaluate = True


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """End training after the current step, with a checkpoint, when asked to by Ctrl-C or SIGTERM.

    A second signal has its usual effect. A signal after the last step has no effect.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop after this step, unless it is the last; log and save, unless the end of the epoch does so."""
        if self._asked and state.global_step < state.max_steps:
            self.stopped = control.should_training_stop = True
            if not _ends_epoch(state):
                control.should_log = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Neither evaluate nor save if the epoch was interrupted."""
        if self.stopped and not _ends_epoch(state):
            control.should_evaluate = control.should_save = control.should_log = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self.__exit__()
        with suppress(OSError, ValueError, RuntimeError):  # the reader of stderr may be gone
            print("\nstopping after this step; a second signal stops at once and loses unsaved steps", file=sys.stderr)


def _ends_epoch(state: Any) -> bool:
    """Tell whether the step that just ended is the last of its epoch."""
    return float(state.epoch).is_integer()

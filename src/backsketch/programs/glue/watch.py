"""What watches a Trainer's run: its progress, its clock, and the wish to stop."""

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
        """Put the loss behind the bar, not all that is logged."""
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
    """Time the steps of a run, without evaluation and saving; checkpoints carry the times to where it continues.

    Args:
        noise_every: the steps in which noise is monitored, which are slower.
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
        """Start."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop."""
        seconds = time.perf_counter() - self._began
        watched = self._noise_every and (state.global_step - 1) % self._noise_every == 0
        kind = "first" if self._is_first else "watched" if watched else "plain"
        self._times[kind][0] += seconds
        self._times[kind][1] += 1
        self._is_first = False

    def step_seconds(self) -> float | None:
        """Return the mean of a plain step; of a watched or a first one, which warms up, only if there is no other."""
        times = (self._times[kind] for kind in _STEPS)
        return next((seconds / count for seconds, count in times if count), None)


_STEPS = ("plain", "watched", "first")


class LogEpochs(TrainerCallback):  # type: ignore[misc]
    """Log what the end of an epoch finds unlogged, so that no checkpoint leaves a part of the loss behind."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for it."""
        control.should_log = True


class EvaluateAtEnd(TrainerCallback):  # type: ignore[misc]
    """Evaluate after the last step, whatever its number."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for it."""
        if state.global_step >= state.max_steps:
            control.should_evaluate = True


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """End training after the current step, with a checkpoint, when asked to by Ctrl-C or SIGTERM.

    A second signal does what it always does, and one after the last step has nothing to stop.
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
        """Stop, unless this was the last step anyway; log and save, unless the epoch's end does."""
        if self._asked and state.global_step < state.max_steps:
            self.stopped = control.should_training_stop = True
            if not _ends_epoch(state):
                control.should_log = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Neither evaluate nor save where the epoch only broke off."""
        if self.stopped and not _ends_epoch(state):
            control.should_evaluate = control.should_save = control.should_log = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self.__exit__()
        with suppress(OSError, ValueError, RuntimeError):  # whoever reads may have got the same signal
            print("\nstopping after this step; once more stops at once and loses what is not saved", file=sys.stderr)


def _ends_epoch(state: Any) -> bool:
    """Tell whether the step that just ended is the last of its epoch."""
    return float(state.epoch).is_integer()

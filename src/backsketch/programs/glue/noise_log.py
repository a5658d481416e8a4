"""NoiseLog: every component of the noise of a few layers, step by step, in a file that survives a stop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ...integrations.session import unwrapped_model
from ...monitor.noise_monitor import NoiseMonitor
from ...monitor.noise_records import Record
from ..result_files import finite


class NoiseLog(TrainerCallback):  # type: ignore[misc]
    """Write α, D²_SGD, D²_sketch and what follows from them, one line of JSON a layer and step.

    Args:
        path: the file; a run that continues keeps the lines up to its checkpoint.
        globs: over the names of the layers.
        every: log each ``every``-th step.
    """

    def __init__(self, path: Path, globs: Sequence[str], every: int) -> None:
        self.path = path
        self._globs = globs
        self._every = every
        self._new: list[Record] = []
        self._monitor: NoiseMonitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Start to monitor the layers, which are converted by now, and drop what was logged after the checkpoint."""
        earlier = [record for record in self.records() if int(record["step"]) <= state.global_step]
        self.path.write_text("".join(map(_line, earlier)))
        monitor = NoiseMonitor(
            unwrapped_model(model), where=self._selects, every=self._every, callback=self._new.append
        )
        self._monitor = monitor.start(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what the step measured, under the number of the run's step."""
        with self.path.open("a") as file:
            file.writelines(_line({**record, "step": state.global_step}) for record in self._new)
        self._new.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop watching."""
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None

    def records(self) -> list[dict[str, Any]]:
        """Return what is logged so far."""
        if not self.path.is_file():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines() if line.endswith("}")]

    def _selects(self, name: str, module: nn.Module) -> bool:
        return any(fnmatchcase(name, glob) for glob in self._globs)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(finite(record)) + "\n"

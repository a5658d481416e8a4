"""Whole training steps, forward, backward and AdamW: kept bytes, peak and time, beside exact and checkpointing.

Times are ratios taken in one process, interleaved, the best of several rounds. Finished parts stay in the record and
are measured again only on request.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backsketch.programs.page_keeping import allocator
from backsketch.programs.result_files import write_record

from .whole_step_measuring import BLOCKS, ROUNDS, deep, timed
from .whole_step_subjects import DTYPES, SUBJECTS

BUSY = 1.5  # processes that ran before the measurement began
WALL, PROCESSOR = "wall time", "processor time"


@dataclass(frozen=True, slots=True)
class Part:
    """One model in one type: timed on a few blocks, or its bytes with all blocks."""

    subject: str
    dtype: str
    deep: bool = False

    @property
    def name(self) -> str:
        return f"{self.subject}-{self.dtype}{'-deep' if self.deep else ''}"

    def measure(self, quick: bool, rounds: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
        """Return an entry for each way to train."""
        if self.deep:
            return deep(self.subject, self.dtype, quick=quick)
        return timed(self.subject, self.dtype, quick=quick, rounds=rounds, clock=clock)


_TIMED = [Part(subject, dtype) for subject in SUBJECTS for dtype in DTYPES]
_DEEP = [Part(subject, dtype, deep=True) for subject in ("encoder", "language-model") for dtype in DTYPES]
PARTS = {part.name: part for part in (*_TIMED, *_DEEP)}


def run(
    parts: Sequence[str], path: Path, *, quick: bool = False, fresh: bool = False, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Measure the parts that the record at ``path`` does not have yet, write each when it is done, return the record.

    On a busy machine the clock is the processor time of the process, which waiting for others does not lengthen.

    Args:
        fresh: measure all of the parts again.
        rounds: how often each step is timed.
    """
    load = os.getloadavg()[0]
    busy = load > BUSY
    rounds = 1 if quick else rounds
    settings = {
        "quick": quick,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "allocator": allocator(),
        "timed blocks": 1 if quick else BLOCKS,
        "batches": {name: "{} x {}".format(*subject.words(quick)) for name, subject in SUBJECTS.items()},
    }
    record = json.loads(path.read_text()) if path.exists() else {"settings": settings, "results": {}}
    if record["settings"] != settings and not fresh:
        raise ValueError(f"{path} was made with other settings: give --fresh to replace it, or another --out")
    results = dict(record["results"]) if record["settings"] == settings else {}
    for name in parts:
        if fresh or name not in results:
            entries = PARTS[name].measure(quick, rounds, time.process_time if busy else time.perf_counter)
            about = {"load before": round(load, 2), "busy": busy, "clock": PROCESSOR if busy else WALL}
            results[name] = {**about, "entries": entries}
            packages = ["transformers", "peft"]
            written = write_record(path, settings=settings, results=results, packages=packages)
            record = json.loads(written.read_text())
    return record

"""Run the demo: train, then write the record and the picture, even if the run was stopped."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..result_files import write_record
from .live import View
from .outcome import outcome
from .scale import Scale
from .text import read_library
from .training import prepare, train

RECORD, PICTURE = "demo.json", "demo.png"


@dataclass(frozen=True, slots=True)
class Written:
    """What a run left on disk."""

    record: dict[str, Any]
    record_path: Path
    picture_path: Path


def run(scale: Scale, *, out: Path, seed: int, quiet: bool = False) -> Written | None:
    """Train all contenders and write the results; None if stopped before the first step was done."""
    text = read_library()
    race = None
    try:
        with View(quiet=quiet) as view:
            race = prepare(scale, text, seed, view.say)
            train(race, text, seed, view.show)
    except KeyboardInterrupt:
        if race is None or not race.steps:
            return None
    results = outcome(race)
    settings = {"model": "byte GPT", "data": "Python's standard library", **asdict(scale), "seed": seed}
    path = write_record(out / RECORD, settings=settings, results=results, packages=["matplotlib"])
    record = json.loads(path.read_text(encoding="utf-8"))
    from .figure import write_figure

    return Written(record, path, write_figure(record, out / PICTURE))

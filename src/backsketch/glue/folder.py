"""A run's folder: whether a run was begun there, finished there, and what of it goes when it is over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ..results import write_json
from .settings import Settings

RECORD, SETTINGS, LOG, NOISE, MODEL = "record.json", "settings.json", "log.json", "noise.jsonl", "model"


def finished(settings: Settings, out: Path, overwrite: bool) -> dict[str, Any] | None:
    """Return the record in ``out`` if these settings were run to the end there.

    Another run there is an error, unless it is to be overwritten.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a directory, got the file {str(out)!r}")
    if overwrite:
        return None
    earlier = out / SETTINGS
    if not earlier.is_file():
        if _checkpoints(out):
            raise ValueError(f"out {str(out)!r} has checkpoints of something else; give another out or overwrite them")
        return None
    before, now = json.loads(earlier.read_text()), json.loads(json.dumps(settings.describe()))
    if changed := {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}:
        named = sorted({name.removesuffix("_digest") for name in changed})
        raise ValueError(
            f"out {str(out)!r} has a run with another {', '.join(named)}; give another out or overwrite it"
        )
    record: dict[str, Any] | None = json.loads((out / RECORD).read_text()) if (out / RECORD).is_file() else None
    return record


def begin(described: dict[str, Any], out: Path, overwrite: bool) -> None:
    """Make ``out`` and say there what is run, after forgetting what was there if that is asked for."""
    if overwrite:
        clear(out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / SETTINGS, described)


def clear(out: Path) -> None:
    """Remove what a run wrote to ``out``, and nothing else; last what tells that it was a run."""
    forget_checkpoints(out)
    shutil.rmtree(out / "tensorboard", ignore_errors=True)
    if (out / SETTINGS).is_file() and json.loads((out / SETTINGS).read_text()).get("save_model"):
        shutil.rmtree(out / MODEL, ignore_errors=True)
    for name in (RECORD, LOG, NOISE, SETTINGS):
        (out / name).unlink(missing_ok=True)


def leave(out: Path, existed: bool) -> None:
    """Remove what a run wrote that did not come to its first step, and its folder if that is its own."""
    clear(out)
    if not existed and not any(out.iterdir()):
        out.rmdir()


def last_checkpoint(out: Path) -> Path | None:
    """Return the last whole checkpoint, and remove what is left of others, whose saving or removal was cut short."""
    folders = _checkpoints(out)
    last = next((folder for folder in reversed(folders) if _is_whole(folder)), None)
    for folder in folders:
        if folder != last:
            shutil.rmtree(folder)
    return last


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(checkpoint.name.rpartition("-")[2])


def _is_whole(checkpoint: Path) -> bool:
    """Tell whether the file that the Trainer writes last is there, and whole."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def forget_checkpoints(out: Path) -> None:
    """Remove the checkpoints, which only an unfinished run needs."""
    for folder in _checkpoints(out):
        shutil.rmtree(folder)


def _checkpoints(out: Path) -> list[Path]:
    """List the Trainer's checkpoints by their steps."""
    named = [path for path in out.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(named, key=step_of)

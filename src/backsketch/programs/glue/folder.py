"""A run's folder: whether a run was started or finished there, and what to remove when it is over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..result_files import write_json
from .settings import Settings

RECORD, SETTINGS, LOG, NOISE = "record.json", "settings.json", "log.json", "noise.jsonl"
MODEL, TENSORBOARD, EARLIER, LOCK = "model", "tensorboard", ".backsketch-overwritten", ".backsketch-lock"


def check_place(out: Path) -> None:
    """Raise ValueError if ``out`` or a folder above it is a file."""
    if files := [path for path in (out, *out.parents) if path.exists() and not path.is_dir()]:
        raise ValueError(f"out must be a directory, got {str(out)!r}, and {str(files[0])!r} is a file")


def finished(settings: Settings, out: Path, overwrite: bool) -> dict[str, Any] | None:
    """Return the record in ``out`` if these settings were run to the end there.

    Another run there is an error, unless it is to be overwritten.
    """
    if (out / EARLIER).is_dir() and not (_checkpoints(out) or (out / RECORD).is_file()):
        leave(out)  # a run that was to overwrite it ended before it saved anything
    if settings.save_model and (out / MODEL).exists() and not _saves_model(out):
        raise ValueError(f"out {str(out)!r} has a model of something else, which save_model would replace")
    if overwrite:
        return None
    earlier = out / SETTINGS
    if not earlier.is_file():
        if foreign := _of_a_run(out):
            raise ValueError(
                f"out {str(out)!r} has {foreign[0].name} of something else; give another out or overwrite it"
            )
        return None
    before, now = json.loads(earlier.read_text()), json.loads(json.dumps(settings.describe()))
    if changed := {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}:
        named = sorted({name.removesuffix("_digest") for name in changed})
        raise ValueError(
            f"out {str(out)!r} has a run with another {', '.join(named)}; give another out or overwrite it"
        )
    record: dict[str, Any] | None = json.loads((out / RECORD).read_text()) if (out / RECORD).is_file() else None
    return record


@contextmanager
def owned(out: Path) -> Iterator[None]:
    """Lock ``out`` against other processes. Create it if needed, and remove it again if it stays empty."""
    made = [path for path in (out, *out.parents) if not path.exists()]
    lock = FileLock(out / LOCK, timeout=0)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ValueError(f"out {str(out)!r} is in use by another process; give another out or wait for it") from None
    except OSError as error:
        _remove_empty(made)
        raise ValueError(f"out must be a directory to write to, got {str(out)!r}: {error.strerror}") from error
    try:
        yield
    finally:
        (out / LOCK).unlink(missing_ok=True)
        lock.release()
        _remove_empty(made)


def begin(described: dict[str, Any], out: Path, overwrite: bool) -> None:
    """Write the settings of the run to ``out``; an earlier run that is to be overwritten is moved aside first."""
    if overwrite:
        forget_earlier(out)
        _move(_of_a_run(out), out / EARLIER)
    write_json(out / SETTINGS, described)


def leave(out: Path) -> None:
    """Remove the files of a run that made no step, and put back the run that it was to overwrite."""
    for path in _of_a_run(out):
        _remove(path)
    if (out / EARLIER).is_dir():
        _move(list((out / EARLIER).iterdir()), out)
        forget_earlier(out)


def forget_earlier(out: Path) -> None:
    """Remove the overwritten run, once there is something in its place."""
    shutil.rmtree(out / EARLIER, ignore_errors=True)


def last_checkpoint(out: Path) -> Path | None:
    """Return the last complete checkpoint, and remove incomplete ones, whose saving or removal was interrupted."""
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
    """Tell whether the file that the Trainer writes last is there and complete."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def forget_checkpoints(out: Path) -> None:
    """Remove the checkpoints, which only an unfinished run needs."""
    for folder in _checkpoints(out):
        shutil.rmtree(folder)


def _of_a_run(out: Path) -> list[Path]:
    """List the files of a run that exist; the one that marks the folder as a run comes last."""
    names = (TENSORBOARD, *([MODEL] if _saves_model(out) else []), RECORD, LOG, NOISE, SETTINGS)
    return [*_checkpoints(out), *(path for name in names if (path := out / name).exists())]


def _saves_model(out: Path) -> bool:
    """Tell whether the run in ``out`` saves its model there."""
    return (out / SETTINGS).is_file() and bool(json.loads((out / SETTINGS).read_text()).get("save_model"))


def _move(paths: list[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in paths:
        path.rename(folder / path.name)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _checkpoints(out: Path) -> list[Path]:
    """List the Trainer's checkpoints by their steps."""
    named = [path for path in out.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(named, key=step_of)

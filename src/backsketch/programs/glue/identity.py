"""Digests of the files that a run reads, so that different files under the same name make a different run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from .tasks import Task

_READ = {".json", ".txt", ".model", ".safetensors", ".bin"}


def model_digest(folder: Path) -> str:
    """Return a digest of the config, weights and tokenizer in a directory."""
    return _digest(path for path in sorted(folder.iterdir()) if path.suffix in _READ)


def data_digest(task: Task, folder: Path) -> str:
    """Return a digest of a task's files that exist."""
    return _digest(folder / task.folder / name for name in (task.train, *task.dev))


def _digest(paths: Iterable[Path]) -> str:
    whole = blake2b(digest_size=8)
    for path in paths:
        if path.is_file():
            now = path.stat()
            whole.update(f"{path.name} {_content(path, now.st_size, now.st_mtime_ns)}\n".encode())
    return whole.hexdigest()


@lru_cache(maxsize=256)
def _content(path: Path, size: int, changed: int) -> str:
    """Return a digest of one file; it is read again only if its size or time has changed."""
    content = blake2b()
    with path.open("rb") as file:
        while part := file.read(2**20):
            content.update(part)
    return content.hexdigest()

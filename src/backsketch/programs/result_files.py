"""Results: one JSON record with what was measured, the settings, versions, commit and machine."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .page_keeping import allocator


def make_record(*, settings: dict[str, Any], results: Any, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return the record, with the versions of torch and of ``packages``."""
    from .. import __version__

    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": settings,
        "versions": {
            "backsketch": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in packages},
        },
        "commit": LOADED,
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "allocator": allocator(),
            **_accelerator(),
        },
        "results": results,
    }


def write_record(path: Path, *, settings: dict[str, Any], results: Any, packages: Sequence[str] = ()) -> Path:
    """Write the record and return its path."""
    record = make_record(settings=settings, results=results, packages=packages)
    write_json(path, record)
    return path


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file at once, so that no reader finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by name, with None for NaN and infinity, which JSON does not have."""
    bad = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: None if name in bad else value for name, value in values.items()}


def commit() -> str:
    """Return the commit of this checkout, with ``-dirty`` if its code differs; "unknown" for an installed copy."""
    here = Path(__file__)
    if _git("ls-files", "--error-unmatch", here.name) is None:  # a repository that only contains the environment
        return "unknown"
    changed = "" if _git("diff", "--quiet", "HEAD", "--", ":/*.py") is not None else "-dirty"
    return (_git("describe", "--always") or "unknown") + changed


def cpu_name() -> str:
    """Return the processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _accelerator() -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in this directory, or None if it fails."""
    command = ["git", *arguments]
    try:
        run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


LOADED = commit()  # read at import: files may change before the record is written

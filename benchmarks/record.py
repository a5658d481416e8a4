"""Results: one JSON record with what was measured, the settings, versions, commit and machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import backsketch


def write_record(path: Path, *, settings: dict[str, Any], results: Any) -> Path:
    """Write the record and return its path."""
    record = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": settings,
        "versions": {
            "backsketch": backsketch.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "commit": commit(),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def commit() -> str:
    """Return the commit of this checkout, marked when files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def cpu_name() -> str:
    """Return the processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())

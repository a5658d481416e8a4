"""The environment: versions, extras, devices, and whether bf16 works on this CPU."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from .. import __version__, cpu_library
from ..programs.result_files import cpu_name
from ..storage.accelerator_kernel import triton_is_here

FIX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
_PROBE = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); assert (a @ a)[0, 0] == 256"


@dataclass(frozen=True, slots=True)
class Extra:
    """An extra of the package: the versions of what it installs, None for what is not installed."""

    name: str
    packages: Mapping[str, str | None]

    @property
    def missing(self) -> list[str]:
        return [package for package, version in self.packages.items() if version is None]

    @property
    def install(self) -> str | None:
        """Return the command that installs what is missing."""
        return f"pip install 'backsketch[{self.name}]'" if self.missing else None


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and backsketch."""
    return {"python": platform.python_version(), "torch": torch.__version__, "backsketch": __version__}


def extras() -> list[Extra]:
    """Return the extras of the installed package, without those for development."""
    try:
        requirements = metadata.requires("backsketch") or []
    except metadata.PackageNotFoundError:
        return []
    found: dict[str, dict[str, str | None]] = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+)[^;]*;\s*extra == ['\"](\w+)['\"]", requirement)
        if match and match[2] not in ("test", "dev"):
            found.setdefault(match[2], {})[match[1]] = _version(match[1])
    return [Extra(name, packages) for name, packages in found.items()]


def devices() -> dict[str, str]:
    """Return device -> name, the CPU first."""
    found = {"cpu": f"{cpu_name()}, {os.cpu_count()} cores, torch threads: {torch.get_num_threads()}"}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        memory = torch.cuda.get_device_properties(index).total_memory
        found[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, {memory / 2**30:.0f} GiB"
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU"
    return found


def kernels() -> dict[str, str]:
    """Return where -> which kernels pack rows there, and why not the fused ones where they do not."""
    missing = cpu_library.why_not()
    cpu = "fused, in C++" if missing is None else f"plain PyTorch, which takes longer: {missing}"
    return {"CPU": cpu, "GPU": _triton()}


def _triton() -> str:
    if triton_is_here():
        here = "" if torch.cuda.is_available() else " (no GPU here)"
        return f"fused, in Triton {_version('triton')}{here}"
    return "plain PyTorch, with some 50 launches more a layer: Triton is not installed, or switched off"


class Bf16Probe:
    """A small bf16 matmul in a process of its own, which some CPUs end with an illegal instruction."""

    def __init__(self) -> None:
        self._first = self._start({})

    def result(self) -> dict[str, Any]:
        """Return whether it works; if not, how it ends, and the environment variable that helps, if one does."""
        code = self._first.wait()
        if code == 0:
            return {"works": True, "ends_with": None, "fix": None}
        helps = self._start(FIX).wait() == 0
        return {"works": False, "ends_with": _ending(code), "fix": FIX if helps else None}

    @staticmethod
    def _start(changes: Mapping[str, str]) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, "OMP_NUM_THREADS": "1", **changes},
            stdout=quiet,
            stderr=quiet,
        )


def _ending(code: int) -> str:
    return "an illegal instruction" if code in (-4, 132) else f"exit code {code}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

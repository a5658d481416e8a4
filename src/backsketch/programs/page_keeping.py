"""Run a process with an allocator that keeps its pages, as the allocators of accelerators do.

By default glibc gives every large block back to the system, and each step faults its pages in again. A step that
allocates more then looks slower than it is: exact training above all.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping

KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
KEEPS = "glibc, keeps its pages"


def restart_keeping_pages() -> None:
    """Start this process again with an allocator that keeps its pages, unless it has one or the user has chosen."""
    if is_glibc() and not any(name in os.environ for name in KEEPING):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **KEEPING})


def allocator(environment: Mapping[str, str] = os.environ) -> str:
    """Describe the allocator of a process started in this environment."""
    if not is_glibc():
        return f"of the system ({sys.platform}), as it is"
    chosen = {name: environment[name] for name in KEEPING if name in environment}
    if chosen == KEEPING:
        served = KEEPS
    elif chosen:
        served = "glibc with " + ", ".join(f"{name}={value}" for name, value in chosen.items())
    else:
        served = "glibc, gives large blocks back"
    return f"{served}; LD_PRELOAD={environment['LD_PRELOAD']}" if environment.get("LD_PRELOAD") else served


def without_keeping(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment in which glibc does what it does by default."""
    return {name: value for name, value in environment.items() if name not in KEEPING}


def is_glibc() -> bool:
    """Tell whether malloc is glibc's, the one that these variables change."""
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"

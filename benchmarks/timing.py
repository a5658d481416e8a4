"""Time several ways to do one thing side by side: interleaved in one process, the best of several rounds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

from rich.progress import Progress

Step = Callable[[], object]


def best_times(steps: Mapping[str, Step], *, rounds: int, title: str, repeat: int = 1) -> dict[str, float]:
    """Return name -> seconds of the fastest run; every round runs each step once, so that all meet the same machine."""
    best = dict.fromkeys(steps, float("inf"))
    for step in steps.values():
        step()
    gc.collect()
    gc.disable()
    try:
        with Progress(transient=True) as progress:
            for _ in progress.track(range(rounds), description=title):
                for name, step in steps.items():
                    start = time.perf_counter()
                    for _ in range(repeat):
                        step()
                    best[name] = min(best[name], (time.perf_counter() - start) / repeat)
    finally:
        gc.enable()
    return best

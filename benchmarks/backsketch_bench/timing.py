"""Time several ways to do one thing side by side: interleaved in one process, the best of several rounds.

On a CPU the process should keep its pages (``backsketch.programs.page_keeping``), or a way that allocates more looks
slower than it is.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from .progress import track

Step = Callable[[], object]
Setup = Callable[[], AbstractContextManager[object]]


def best_times(
    steps: Mapping[str, Step],
    *,
    rounds: int,
    title: str,
    repeat: int = 1,
    prepare: Mapping[str, Setup] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return name -> seconds of the fastest run, of those that ``all_times`` makes."""
    times = all_times(steps, rounds=rounds, title=title, repeat=repeat, prepare=prepare, clock=clock)
    return {name: min(seconds) for name, seconds in times.items()}


def all_times(
    steps: Mapping[str, Step],
    *,
    rounds: int,
    title: str,
    repeat: int = 1,
    prepare: Mapping[str, Setup] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return name -> seconds in each round. Every round runs each step once, so that all run under the same load.

    ``prepare`` maps a name to a context for its step, such as a converted model; it is not timed.
    ``clock`` returns seconds.
    """
    setups = {name: nullcontext if prepare is None else prepare[name] for name in steps}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in steps.items():
        with setups[name]():
            step()
    gc.collect()
    gc.disable()
    try:
        for _ in track(range(rounds), title, rounds):
            for name, step in steps.items():
                with setups[name]():
                    start = clock()
                    for _ in range(repeat):
                        step()
                    times[name].append((clock() - start) / repeat)
    finally:
        gc.enable()
    return times

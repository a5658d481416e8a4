"""Measure what the allocator does to the comparison: the same steps with glibc keeping its pages, and by default.

Each allocator serves a process of its own. ``python -m backsketch_bench.speed_allocators ROWS ROUNDS THREADS`` is that
process: it prints its times and page faults as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from backsketch.programs.page_keeping import KEEPING, is_glibc, without_keeping

from .contenders import layer_contenders
from .speed_layers import BASE_SHAPES, layer_rows
from .speed_steps import layer_step
from .timing import best_times

SHOWN = ("exact", "rows, ratio 0.1", "recommended", "all rows, 8 bits")


def allocators(quick: bool) -> list[dict[str, Any]]:
    """Time a few ways to train one layer in fp32 under each allocator; where there is no glibc, none."""
    if not is_glibc():
        return []
    default = without_keeping()
    kept, given = (_measured_in(each, quick) for each in ({**default, **KEEPING}, default))
    return [{"name": name, "keeping": kept[name], "default": given[name]} for name in SHOWN]


def _measured_in(environment: Mapping[str, str], quick: bool) -> dict[str, dict[str, float]]:
    """Return name -> what was measured, in a process with this environment."""
    arguments = (layer_rows(quick), 2 if quick else 12, torch.get_num_threads())
    paths = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, "-m", __name__, *map(str, arguments)],
        env={**environment, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,  # stderr shows the progress
        check=True,
    )
    measured: dict[str, dict[str, float]] = json.loads(run.stdout)
    exact = measured["exact"]["seconds"]
    return {name: {**own, "speed": exact / own["seconds"]} for name, own in measured.items()}


def measure(rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return for each way the seconds of its fastest step, and the fewest page faults of one."""
    features, outputs = BASE_SHAPES[0]
    torch.manual_seed(0)
    x, y = torch.randn(rows, features, requires_grad=True), torch.randn(rows, outputs)
    layer = nn.Linear(features, outputs)
    steps = {way.name: layer_step(way, layer, x, y) for way in layer_contenders(x.dtype) if way.name in SHOWN}
    times = best_times(steps, rounds=rounds, title="one allocator")
    found: dict[str, dict[str, float]] = {}
    for name, step in steps.items():
        counts = []
        for _ in range(3):
            before = _faults()
            step()
            counts.append(_faults() - before)
        found[name] = {"seconds": times[name], "faults": min(counts)}
    return found


def _faults() -> int:
    import resource  # not on every system

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    _rows, _rounds, _threads = map(int, sys.argv[1:])
    torch.set_num_threads(_threads)
    print(json.dumps(measure(_rows, _rounds)))

"""The speed of a training step, beside nn.Linear, the paper's method, checkpointing, offloading and int8 storage.

Every figure is a ratio of times taken in one process, interleaved, the best of several rounds. Finished parts stay
in the record and are measured again only on request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backsketch.programs.page_keeping import allocator
from backsketch.programs.result_files import write_record

from .speed_allocators import allocators
from .speed_growth import growth
from .speed_layers import kinds, layer_rows, layers, overhead, transient
from .speed_models import dropout, encoder, encoder_size

Show = Callable[[dict[str, Any], str], object]

PARTS: dict[str, Callable[[bool], list[dict[str, Any]]]] = {
    "layers": layers,
    "layers-bfloat16": partial(layers, dtype=torch.bfloat16),
    "allocators": allocators,
    "kinds": kinds,
    "overhead": overhead,
    "transient": transient,
    "growth": growth,
    "encoder": encoder,
    "encoder-bfloat16": partial(encoder, dtype=torch.bfloat16),
    "dropout": dropout,
}


def run(
    parts: Sequence[str], path: Path, *, quick: bool = False, fresh: bool = False, show: Show | None = None
) -> dict[str, Any]:
    """Measure the parts that the record at ``path`` does not have yet, write each when it is done, return the record.

    Args:
        fresh: measure all of the parts again.
        show: called with the record and a part's name as soon as the part is measured.
    """
    settings = {
        "quick": quick,
        "threads": torch.get_num_threads(),
        "allocator": allocator(),
        "layer rows": layer_rows(quick),
        "encoder blocks": encoder_size(quick)[0],
        "encoder batch": "{1} x {2}".format(*encoder_size(quick)),
    }
    record = json.loads(path.read_text()) if path.exists() else {"settings": settings, "results": {}}
    used = record["settings"]
    same = all(used.get(name) == settings[name] for name in ("quick", "threads", "allocator"))
    if not (same or fresh):
        made = "{}, threads={threads}".format("quick" if used["quick"] else "full", **used)
        if used.get("allocator") != settings["allocator"]:
            made += f", allocator: {used.get('allocator', 'not recorded')}"
        raise ValueError(f"{path} was made with other settings ({made}): give --fresh to replace it, or another --out")
    results = dict(record["results"]) if same else {}
    for name in parts:
        if fresh or name not in results:
            torch.manual_seed(0)
            results[name] = PARTS[name](quick)
            record = json.loads(write_record(path, settings=settings, results=results).read_text())
        if show is not None:
            show(record, name)
    return record

"""Measures: what a cell can ask for. Each writes one record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import complexity
import throughput
import torch
from cells import config_of, settings_of
from grid import Cell

from backsketch import ignore_attention_mask
from backsketch.glue import finetune as tuning
from backsketch.glue.loading import encode, load
from backsketch.glue.reading import read_file
from backsketch.glue.step_memory import largest_batch, step_memory
from backsketch.results import make_record, write_whole

PACKAGES = ("transformers", "accelerate", "numpy")


@dataclass(frozen=True, slots=True)
class Places:
    """Where a cell finds its models and data, works, and leaves its record."""

    weights: Path
    data: Path
    work: Path
    record: Path


def finetune(cell: Cell, places: Places) -> None:
    """Fine-tune with progress; what is stopped continues next time, unless the grid says something else by then."""
    settings = settings_of(cell.values, places.weights, places.data)
    record = tuning.finetune(settings, places.work / settings.slug(), progress=True)
    _write(cell, places, record)
    shutil.rmtree(places.work)


def memory(cell: Cell, places: Places) -> None:
    """Measure one step on the longest examples of a file: bytes kept, and the peak."""
    values = dict(cell.values)
    file = values.pop("file", None)
    settings = settings_of(values, places.weights, places.data)
    task = settings.the_task
    torch.manual_seed(settings.seed)
    model, tokenizer = load(settings)
    examples = read_file(task, places.data / task.folder / (file or task.train))
    encoded = encode(examples, model, tokenizer, settings.the_recipe.max_length)
    batch = largest_batch(encoded, tokenizer, settings.the_recipe.batch_size)
    ignore_attention_mask(model, settings.ignore_mask)
    measured = step_memory(model, batch, settings.config, lambda name, module: not settings.excluded(name))
    _write(cell, places, make_record(settings=settings.describe(), results=measured, packages=PACKAGES))


def counted(cell: Cell, places: Places) -> None:
    """Count the operations and bytes of one linear layer."""
    values = cell.values
    results = complexity.count(config_of(values), values["rows"], values["inputs"], values["outputs"])
    _write(cell, places, make_record(settings=dict(values), results=results))


def timed(cell: Cell, places: Places) -> None:
    """Time steps of one model in several ways, interleaved."""
    ways: Mapping[str, dict[str, Any]] = cell.values["ways"]
    configs = {name: config_of(way) for name, way in ways.items()}
    rest = {name: value for name, value in cell.values.items() if name != "ways"}
    results = throughput.compare(places.weights, configs, **rest)
    _write(cell, places, make_record(settings=dict(cell.values), results=results, packages=PACKAGES))


def _write(cell: Cell, places: Places, record: dict[str, Any]) -> None:
    """Write the record with the cell's labels, by which it is found again."""
    places.record.parent.mkdir(parents=True, exist_ok=True)
    write_whole(places.record, json.dumps({"cell": cell.labels, **record}, indent=1) + "\n")


MEASURES: dict[str, Callable[[Cell, Places], None]] = {
    "finetune": finetune,
    "memory": memory,
    "complexity": counted,
    "throughput": timed,
}

"""Measures: what a cell can ask for. Each is checked before the first cell of a grid runs, and gives one record."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import complexity
import noise_limit_training
import noise_quadratic
import throughput
import torch
from cells import SKETCH, config_of, said, settings_of

from backsketch import SketchConfig, ignore_attention_mask
from backsketch.programs.glue import finetune as tuning
from backsketch.programs.glue.loading import encode, load
from backsketch.programs.glue.reading import Examples, read_file, read_task, task_files
from backsketch.programs.glue.settings import Settings
from backsketch.programs.glue.step_memory import largest_batch, step_memory
from backsketch.programs.glue.tasks import Task, find_task
from backsketch.programs.result_files import make_record

PACKAGES = ("transformers", "accelerate", "numpy")

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Places:
    """The folders of models and of data, and the folder for unfinished runs."""

    weights: Path
    data: Path
    work: Path


@dataclass(frozen=True, slots=True)
class Measure:
    """A way to measure a cell.

    Attributes:
        check: raises ValueError if a cell has a wrong or missing value, or if its model or data are missing.
        run: measures and returns the record.
        said: the settings of its record that a cell fixes.
    """

    check: Callable[[Values, Places], None]
    run: Callable[[Values, Places], dict[str, Any]]
    said: Callable[[Values], dict[str, Any]] = dict

    def differing(self, values: Values, record: Mapping[str, Any]) -> list[str]:
        """List the settings in which a record differs from its cell; it was then made from another cell."""
        settings = dict(record["settings"])
        if settings.get("config"):  # a field that did not exist then has its default
            settings["config"] = {**asdict(SketchConfig()), **settings["config"]}
        return _differing(json.loads(json.dumps(self.said(values))), settings)


def check_finetune(values: Values, places: Places) -> None:
    """Check the settings and read the task's files."""
    _check_model(values, places)
    _read(settings_of(values, places.weights, places.data).the_task, places.data)


def run_finetune(values: Values, places: Places) -> dict[str, Any]:
    """Fine-tune with progress; a stopped run continues next time, unless the grid has changed by then."""
    settings = settings_of(values, places.weights, places.data)
    return tuning.finetune(settings, places.work / settings.slug(), progress=True)


def check_memory(values: Values, places: Places) -> None:
    """Check the settings and look for the file the examples are from."""
    _check_model(values, places)
    task = _memory_settings(values, places).the_task
    task_files(task, places.data, (values.get("file", task.train),))


def run_memory(values: Values, places: Places) -> dict[str, Any]:
    """Measure one step on the longest examples of a file: bytes kept, and the peak."""
    settings = _memory_settings(values, places)
    task = settings.the_task
    torch.manual_seed(settings.seed)
    model, tokenizer = load(settings)
    examples = read_file(task, places.data / task.folder / values.get("file", task.train))
    encoded = encode(examples, model, tokenizer, settings.the_recipe.max_length)
    batch = largest_batch(encoded, tokenizer, settings.the_recipe.batch_size)
    ignore_attention_mask(model, settings.ignore_mask)
    measured = step_memory(model, batch, settings.config, lambda name, module: not settings.excluded(name))
    return make_record(settings=settings.describe(), results=measured, packages=PACKAGES)


def check_complexity(values: Values, places: Places) -> None:
    """Check the sketch and that the layer's sizes are given."""
    config_of(values)
    needed = _parameters(complexity.count) - {"config"}
    _check_names(values, needed, needed | SKETCH)


def run_complexity(values: Values, places: Places) -> dict[str, Any]:
    """Count the operations and bytes of one linear layer."""
    results = complexity.count(config_of(values), values["rows"], values["inputs"], values["outputs"])
    return make_record(settings=dict(values), results=results)


def check_throughput(values: Values, places: Places) -> None:
    """Check the ways and look for the model."""
    needed = _parameters(throughput.compare) - {"weights", "configs"} | {"ways"}
    _check_names(values, needed, needed)
    _check_model(values, places)
    for way in values["ways"].values():
        _check_names(way, (), SKETCH)
        config_of(way)


def run_throughput(values: Values, places: Places) -> dict[str, Any]:
    """Time steps of one model in several ways, interleaved."""
    configs = {name: config_of(way) for name, way in values["ways"].items()}
    rest = {name: value for name, value in values.items() if name != "ways"}
    results = throughput.compare(places.weights, configs, **rest)
    return make_record(settings=dict(values), results=results, packages=PACKAGES)


def check_quadratic(values: Values, places: Places) -> None:
    """Check that the sizes are given, and the names of the way and of the optimizer."""
    needed = _parameters(noise_quadratic.measure)
    _check_names(values, needed, needed)
    for name, known in (("way", noise_quadratic.WAYS), ("optimizer", noise_quadratic.OPTIMIZERS)):
        if values[name] not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {values[name]!r}")


def run_quadratic(values: Values, places: Places) -> dict[str, Any]:
    """Measure the stationary loss of one way to train."""
    return make_record(settings=dict(values), results=noise_quadratic.measure(**values))


def check_noise_limit(values: Values, places: Places) -> None:
    """Check the names, and look for the model and the task's files."""
    _check_names(values, {"model", "task", "steps", "seed"}, {"model", "task", "steps", "seed", "limit"})
    _check_model(values, places)
    _read(find_task(values["task"]), places.data)


def run_noise_limit(values: Values, places: Places) -> dict[str, Any]:
    """Fine-tune under a limit of the noise."""
    given = {"limit": None, **values}
    results = noise_limit_training.train(places.weights, places.data, **given)
    return make_record(settings=noise_limit_training.described(**given), results=results, packages=PACKAGES)


@cache
def _read(task: Task, data: Path) -> list[Examples]:
    return read_task(task, data)


def _differing(said: Values, settings: Values) -> list[str]:
    names: list[str] = []
    for name, value in said.items():
        found = settings.get(name)
        if isinstance(value, dict) and isinstance(found, dict):
            names += _differing(value, found)
        elif value != found:
            names.append(name)
    return names


def _memory_settings(values: Values, places: Places) -> Settings:
    given = {name: value for name, value in values.items() if name != "file"}
    return settings_of(given, places.weights, places.data)


def _check_model(values: Values, places: Places) -> None:
    _check_names(values, {"model"}, values)
    if not (places.weights / values["model"] / "config.json").is_file():
        raise ValueError(
            f"weights must have a directory {values['model']!r} with config.json, got {str(places.weights)!r}"
        )


def _check_names(values: Values, needed: Collection[str], known: Collection[str]) -> None:
    if missing := sorted(set(needed) - values.keys()):
        raise ValueError(f"a cell of this measure must have {', '.join(missing)}")
    if unknown := sorted(values.keys() - set(known)):
        raise ValueError(f"a cell of this measure cannot have {', '.join(unknown)}")


def _parameters(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters)


MEASURES = {
    "finetune": Measure(check_finetune, run_finetune, said),
    "memory": Measure(check_memory, run_memory, said),
    "complexity": Measure(check_complexity, run_complexity),
    "throughput": Measure(check_throughput, run_throughput),
    "quadratic": Measure(check_quadratic, run_quadratic),
    "noise_limit": Measure(check_noise_limit, run_noise_limit),
}

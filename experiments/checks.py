"""Checks: whether a cell can run, told before the first of a grid does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import complexity
import throughput
from cells import config_of, settings_of
from grid import Cell

from backsketch.glue.reading import task_files


def check(cell: Cell, weights: Path, data: Path) -> None:
    """Raise ValueError where a cell has a wrong or missing value, or its model or data are not there."""
    try:
        CHECKS[cell.measure](cell.values, weights, data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{cell.name}: {error}") from error


def _finetune(values: Mapping[str, Any], weights: Path, data: Path) -> None:
    _model(values, weights)
    task_files(settings_of(values, weights, data).the_task, data)


def _memory(values: Mapping[str, Any], weights: Path, data: Path) -> None:
    _model(values, weights)
    settings = settings_of({name: value for name, value in values.items() if name != "file"}, weights, data)
    task = settings.the_task
    task_files(task, data, (values.get("file", task.train),))


def _complexity(values: Mapping[str, Any], weights: Path, data: Path) -> None:
    config_of(values)
    _names(values, _parameters(complexity.count) - {"config"})


def _throughput(values: Mapping[str, Any], weights: Path, data: Path) -> None:
    _names(values, _parameters(throughput.compare) - {"weights", "configs"} | {"ways"})
    _model(values, weights)
    for way in values["ways"].values():
        config_of(way)


def _model(values: Mapping[str, Any], weights: Path) -> None:
    _names(values, {"model"})
    if not (weights / values["model"] / "config.json").is_file():
        raise ValueError(f"weights must have a directory {values['model']!r} with config.json, got {str(weights)!r}")


def _names(values: Mapping[str, Any], needed: Collection[str]) -> None:
    if missing := sorted(set(needed) - values.keys()):
        raise ValueError(f"a cell of this measure must have {', '.join(missing)}")


def _parameters(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters)


CHECKS: dict[str, Callable[[Mapping[str, Any], Path, Path], None]] = {
    "finetune": _finetune,
    "memory": _memory,
    "complexity": _complexity,
    "throughput": _throughput,
}

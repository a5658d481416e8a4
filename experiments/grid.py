"""Grid: the cells of an experiment, read from a TOML file.

``[all]`` holds what all cells have in common. Each ``[axes.<axis>.<entry>]`` adds to it, and the cells are all
combinations of one entry of each axis. A list under ``seed`` or ``batch_size`` makes one cell of each of its values.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    import tomli as tomllib

VARIED = ("batch_size", "seed")


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure.

    Attributes:
        labels: axis -> entry, and what is varied -> value: what tells the cell from the others.
        measure: a name in ``measures.MEASURES``.
        values: everything the measure is given.
    """

    grid: str
    labels: dict[str, Any]
    measure: str
    values: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the grid's name and the labels, fit for a file: ``glue/cola-gaussian-0.1-seed-0``."""
        parts = [f"{axis} {label}" if axis in VARIED else str(label) for axis, label in self.labels.items()]
        return f"{self.grid}/" + (re.sub("[^a-z0-9.]+", "-", " ".join(parts).lower()).strip("-") or self.measure)


def read_grid(path: Path) -> list[Cell]:
    """Return the cells, those of the first seed first."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"grid must be a TOML file, got {str(path)!r}, which is not there") from error
    if unknown := table.keys() - {"measure", "all", "axes"}:
        raise ValueError(f"{path.name} may have measure, all and axes, got {', '.join(sorted(unknown))}")
    if not isinstance(measure := table.get("measure"), str):
        raise ValueError(f"{path.name} must name a measure, got {measure!r}")
    axes = table.get("axes", {})
    cells = []
    for chosen in itertools.product(*(entries.items() for entries in axes.values())):
        labels = dict(zip(axes, (label for label, _ in chosen), strict=True))
        values = dict(table.get("all", {}))
        for _, entry in chosen:
            values |= entry
        varied = [name for name in VARIED if isinstance(values.get(name), list)]
        for combination in itertools.product(*(values[name] for name in varied)):
            own = dict(zip(varied, combination, strict=True))
            cells.append(Cell(path.stem, labels | own, measure, values | own))
    return sorted(cells, key=lambda cell: cell.values.get("seed", 0))

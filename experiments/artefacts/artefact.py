"""Artefact: one table or figure, and helpers to make its parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grid import Cell, read_grid
from matplotlib.figure import Figure

HERE = Path(__file__).parents[1]
GRIDS, RECORDS = HERE / "grids", HERE / "records"
MISSING = "–"

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Artefact:
    """A table or figure of the paper.

    Attributes:
        name: of its command and its files.
        title: what it shows, and where in the paper.
        grids: the grids it reads.
        only: tells from the labels of a cell whether the artefact needs it.
        render: text of a page without its title, and the figure, from the records of all its grids.
    """

    name: str
    title: str
    grids: tuple[str, ...]
    render: Callable[[list[Record]], tuple[str, Figure | None]]
    only: Callable[[dict[str, Any]], bool] = lambda labels: True

    def cells(self) -> list[Cell]:
        """List the cells it is made of."""
        cells = [cell for grid in self.grids for cell in read_grid(GRIDS / f"{grid}.toml")]
        return [cell for cell in cells if self.only(cell.labels)]

    def records(self, folder: Path = RECORDS) -> list[Record]:
        """Read the records that are there; each also gets the name of its grid."""
        paths = [(cell.grid, folder / f"{cell.name}.json") for cell in self.cells()]
        return [{"grid": grid, **json.loads(path.read_text())} for grid, path in paths if path.is_file()]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, its first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def select(records: Sequence[Record], grid: str, **labels: Any) -> list[Record]:
    """Return the records of a grid whose cells have these labels."""
    return [
        record
        for record in records
        if record["grid"] == grid and all(record["cell"].get(name) == label for name, label in labels.items())
    ]


def ways(records: Sequence[Record], axis: str = "way") -> list[str]:
    """Return the labels of an axis that occur, in their order."""
    return list(dict.fromkeys(record["cell"][axis] for record in records if axis in record["cell"]))


def where_from(records: Sequence[Record]) -> str:
    """Return a sentence on the machine and versions of the records."""
    machines = sorted({f"{record['machine']['cpu']}, {record['machine']['cores']} cores" for record in records})
    versions = sorted({f"torch {record['versions']['torch']}" for record in records})
    commits = sorted({record["commit"] for record in records})
    count = "1 record" if len(records) == 1 else f"{len(records)} records"
    return f"From {count}: {'; '.join(machines)}; {', '.join(versions)}; commit {', '.join(commits)}."

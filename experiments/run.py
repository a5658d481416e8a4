"""Run the cells of grids that have no record yet.

    python experiments/run.py experiments/grids/glue.toml --weights DIR --data DIR
    python experiments/run.py experiments/grids/glue.toml --only '*cola*' ...

Each finished cell is one JSON record. A run that was stopped continues where it was: finished cells are not repeated,
and an unfinished fine-tuning continues from its last checkpoint.
"""

from __future__ import annotations

import json
import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock, Timeout
from grid import Cell, read_grid
from measures import MEASURES, Places
from rich.console import Console

from backsketch.programs.glue.finetune import Interrupted
from backsketch.programs.page_keeping import restart_keeping_pages
from backsketch.programs.result_files import write_json

HERE = Path(__file__).parent


def main(
    grids: Annotated[list[Path], typer.Argument(help="TOML files.")],
    weights: Annotated[Path, typer.Option(help="Directory with a directory for each model.")],
    data: Annotated[Path, typer.Option(help="Directory of GLUE's files (DIR/CoLA/train.tsv, ...).")],
    only: Annotated[list[str] | None, typer.Option(help="Globs over the names of cells.")] = None,
    records: Annotated[Path, typer.Option(help="Where records go.")] = HERE / "records",
    work: Annotated[Path, typer.Option(help="Directory for unfinished runs.")] = Path("runs/experiments"),
    list_only: Annotated[bool, typer.Option("--list", help="Only list the cells.")] = False,
) -> None:
    """Run what is missing."""
    say = Console(stderr=True).print
    cells = chosen_cells(grids, only)
    check_records(cells, records)
    missing = [cell for cell in cells if not (records / f"{cell.name}.json").is_file()]
    say(f"{len(cells)} cells, {len(missing)} without a record")
    if not list_only:
        check_cells(missing, Places(weights, data, work))
    for number, cell in enumerate(missing, 1):
        say(f"[bold]{number}/{len(missing)}[/bold] {cell.name}")
        if list_only:
            continue
        try:
            measure(cell, Places(weights, data, work / cell.name), records / f"{cell.name}.json")
        except Timeout:
            say("runs in another process")
        except Interrupted as stopped:
            say(str(stopped))
            sys.exit(130)


def chosen_cells(grids: list[Path], only: list[str] | None) -> list[Cell]:
    """Return the cells of all grids whose names match."""
    try:
        cells = [cell for path in grids for cell in read_grid(path)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if unknown := {cell.measure for cell in cells} - MEASURES.keys():
        raise typer.BadParameter(f"measure must be one of {', '.join(MEASURES)}, got {', '.join(sorted(unknown))}")
    chosen = [cell for cell in cells if not only or any(fnmatchcase(cell.name, glob) for glob in only)]
    if not chosen:
        raise typer.BadParameter(f"only matches none of {len(cells)} cells; one of them is {cells[0].name}")
    return chosen


def check_records(cells: list[Cell], records: Path) -> None:
    """Raise if a record was made with other settings than its cell has now: a page would mix both."""
    for cell in cells:
        path = records / f"{cell.name}.json"
        if not path.is_file():
            continue
        if differing := MEASURES[cell.measure].differing(cell.values, json.loads(path.read_text())):
            raise typer.BadParameter(
                f"{cell.name}: its record has another {', '.join(differing)}; delete {path} to run the cell again"
            )


def check_cells(cells: list[Cell], places: Places) -> None:
    """Find mistakes and missing files of any cell, before anything runs."""
    for name, folder in (("weights", places.weights), ("data", places.data)):
        if not folder.is_dir():
            raise typer.BadParameter(f"{name} must be a directory, got {str(folder)!r}")
    for cell in cells:
        try:
            MEASURES[cell.measure].check(cell.values, places)
        except (TypeError, ValueError) as error:
            raise typer.BadParameter(f"{cell.name}: {error}") from error


def measure(cell: Cell, places: Places, path: Path) -> None:
    """Run a cell, write its record with the cell's labels, and remove its unfinished run.

    Raises filelock.Timeout if another process is running the cell.
    """
    lock = places.work.with_name(places.work.name + ".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock, timeout=0):
        if path.is_file():  # written meanwhile by another process
            return
        record = MEASURES[cell.measure].run(cell.values, places)
        write_json(path, {"cell": cell.labels, **record})
        shutil.rmtree(places.work, ignore_errors=True)
        lock.unlink(missing_ok=True)


if __name__ == "__main__":
    restart_keeping_pages()
    typer.run(main)

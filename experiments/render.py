"""Render tables and figures from the records that are there.

python experiments/render.py glue        one of them: experiments/rendered/glue.md and glue.png
python experiments/render.py             all
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from artefacts import ARTEFACTS
from artefacts.artefact import HERE, RECORDS, Artefact
from rich.console import Console


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Any of {', '.join(ARTEFACTS)}. Default: all.")] = None,
    records: Annotated[Path, typer.Option(help="Where the records are.")] = RECORDS,
    out: Annotated[Path, typer.Option(help="Directory for pages and pictures.")] = HERE / "rendered",
) -> None:
    """Write a page for each, and a picture where it has one."""
    if unknown := [name for name in names or () if name not in ARTEFACTS]:
        raise typer.BadParameter(f"names must be of {', '.join(ARTEFACTS)}, got {', '.join(unknown)}")
    say = Console(stderr=True).print
    for artefact in (ARTEFACTS[name] for name in names or ARTEFACTS):
        for path in write(artefact, records, out):
            say(f"wrote {path}")


def write(artefact: Artefact, records: Path, out: Path) -> list[Path]:
    """Render one artefact and return the files written; none if it has no records."""
    found = artefact.records(records)
    if not found:
        Console(stderr=True).print(f"{artefact.name}: no records of {', '.join(artefact.grids)} yet")
        return []
    text, figure = artefact.render(found)
    out.mkdir(parents=True, exist_ok=True)
    page, picture = out / f"{artefact.name}.md", out / f"{artefact.name}.png"
    head = f"# {artefact.title}\n\n"
    count, cells = len(found), len(artefact.cells())
    if count < cells:
        head += f"**{count} of {cells} cells have run; the others are missing here.**\n\n"
    if figure is not None:
        figure.savefig(picture, dpi=150)
        head += f"![{artefact.title}]({picture.name})\n\n"
    page.write_text(head + text, encoding="utf-8")
    return [page] if figure is None else [page, picture]


if __name__ == "__main__":
    typer.run(main)

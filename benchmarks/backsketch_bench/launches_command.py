"""Count what a training step launches and moves on an accelerator, print tables, write a record and draw it.

python benchmarks/launches.py [--out DIR]

Nothing runs on an accelerator: shapes are followed on the meta device. Times are estimates from published limits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .launches import run
from .launches_figure import write_launches_figure
from .launches_table import NOTES, tables


def main(out: Path) -> None:
    """Count, print and write ``launches.json`` and its figure to ``out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out, help="directory to write to")
    path = parser.parse_args().out / "launches.json"
    for title, table in tables(run(path)):
        print(title, end="\n\n")
        table.show()
        print()
    print(*NOTES, sep="\n")
    print("\nwrote", ", ".join(map(str, [path, *write_launches_figure(path)])))

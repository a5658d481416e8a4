"""Measure whole training steps of a few models, print tables, write a record and draw it.

python benchmarks/whole_step.py [--quick] [--part PART ...] [--fresh] [--markdown]

A run that was stopped continues with the same command: parts that the record has are not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from .whole_step import PARTS, run
from .whole_step_figure import write_whole_step_figure
from .whole_step_measuring import ROUNDS
from .whole_step_pages import pages
from .whole_step_table import table, title, totals


def main(out: Path, arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write ``whole_step.json`` and its figure to ``out``, or to ``out/quick``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small batches and one block: a minute, for a look")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="what to measure; repeatable")
    parser.add_argument("--fresh", action="store_true", help="measure again what the record already has")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each step is timed; the best counts")
    parser.add_argument("--threads", type=int, help="number of CPU threads for torch")
    parser.add_argument("--markdown", action="store_true", help="also print the tables of the pages")
    parser.add_argument("--out", type=Path, help="directory to write to")
    given = parser.parse_args(arguments)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    folder: Path = given.out or (out / "quick" if given.quick else out)
    path = folder / "whole_step.json"

    chosen = given.part or list(PARTS)
    try:
        record = run(chosen, path, quick=given.quick, fresh=given.fresh, rounds=given.rounds)
    except ValueError as problem:
        parser.error(str(problem))
    print("Totals", totals(record), sep="\n\n", end="\n\n")
    for name in chosen:
        print(title(record, name), table(record, name), sep="\n\n", end="\n\n")
    if given.markdown:
        print(*pages(record), sep="\n\n", end="\n\n")
    print("wrote", ", ".join(map(str, [path, *write_whole_step_figure(path)])))

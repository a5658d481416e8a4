"""Options that several commands have, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
from typer import Option

from ..sketches import SKETCHES
from .problems import Problem

SKETCH = "What layers keep"

KINDS = f"Kind of sketch: {', '.join(SKETCHES)}. By default rows."
BLOCK = "Sketch so many rows at a time: cheaper for all kinds but rows and hash. By default all at once."

Kind: TypeAlias = Annotated[str | None, Option(help=KINDS, rich_help_panel=SKETCH)]
Ratio: TypeAlias = Annotated[
    float | None, Option(help="Share of the rows kept. By default 0.1 beside other options.", rich_help_panel=SKETCH)
]
Dim: TypeAlias = Annotated[int | None, Option(help="Rows kept, instead of a ratio.", rich_help_panel=SKETCH)]
Bits: TypeAlias = Annotated[
    int | None,
    Option(
        help="Store kept rows in 8, 4 or 2 bits. By default as they are beside other options.", rich_help_panel=SKETCH
    ),
]
Block: TypeAlias = Annotated[int | None, Option(help=BLOCK, rich_help_panel=SKETCH)]
Center: TypeAlias = Annotated[bool, Option("--center", help="Keep the mean exactly.", rich_help_panel=SKETCH)]

Seed: TypeAlias = Annotated[int, Option(help="Of everything random.")]
Quick: TypeAlias = Annotated[bool, Option("--quick", help="Small sizes, to see that it runs.")]
Threads: TypeAlias = Annotated[int | None, Option(help="Threads for torch. By default its own choice.")]
Out: TypeAlias = Annotated[
    Path | None, Option(help="Directory to write to.", show_default="bench, with --quick bench/quick")
]
AsJson: TypeAlias = Annotated[bool, Option("--json", help="Print the record as JSON, and nothing else.")]


def given_fields(
    kind: str | None, ratio: float | None, dim: int | None, bits: int | None, block: int | None, center: bool
) -> dict[str, Any]:
    """Return the fields of a SketchConfig that the user gave."""
    fields = {"kind": kind, "ratio": ratio, "dim": dim, "bits": bits, "block": block, "center": center or None}
    return {name: value for name, value in fields.items() if value is not None}


def check_budget(budget: str | None, given: dict[str, Any]) -> None:
    """Raise a Problem where a budget is given together with what it decides."""
    if budget is not None and (clash := [f"--{name}" for name in ("ratio", "dim") if name in given]):
        raise Problem(f"--budget finds the ratio: it excludes {', '.join(clash)}")


def parse_budget(text: str | None) -> str | float | int | None:
    """Return a number of bytes or a share as a number, and what has a unit or a % as it is."""
    if text is None:
        return None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def set_threads(threads: int | None) -> None:
    """Give torch so many threads, if so many were asked for."""
    if threads is None:
        return
    if threads < 1:
        raise Problem(f"threads must be a positive integer, got {threads}")
    torch.set_num_threads(threads)

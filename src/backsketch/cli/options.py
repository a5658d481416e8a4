"""Options that several commands have, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
from typer import Option

from ..sketches import SKETCHES
from .problems import Problem

SKETCH = "What layers keep (default: rows in 3 bits, rotated, a tenth of fp32 bytes)"

KINDS = f"Kind of sketch: {', '.join(SKETCHES)}. Default: rows."
BLOCK = "Sketch blocks of so many rows: cheaper for all kinds except rows and hash. Default: all rows at once."

Kind: TypeAlias = Annotated[str | None, Option(help=KINDS, rich_help_panel=SKETCH)]
Ratio: TypeAlias = Annotated[
    float | None,
    Option(help="Share of rows to keep; 0.1 if only other options of this group are given.", rich_help_panel=SKETCH),
]
Dim: TypeAlias = Annotated[
    int | None, Option(help="Number of rows to keep, instead of --ratio.", rich_help_panel=SKETCH)
]
Bits: TypeAlias = Annotated[
    int | None,
    Option(
        help="Store kept rows in 8, 4, 3 or 2 bits; as they are if only other options of this group are given.",
        rich_help_panel=SKETCH,
    ),
]
Block: TypeAlias = Annotated[int | None, Option(help=BLOCK, rich_help_panel=SKETCH)]
Center: TypeAlias = Annotated[bool, Option("--center", help="Also keep the mean row, exactly.", rich_help_panel=SKETCH)]
Rotate: TypeAlias = Annotated[
    bool, Option("--rotate", help="Rotate rows before --bits round them: much less noise.", rich_help_panel=SKETCH)
]

Seed: TypeAlias = Annotated[int, Option(help="Seed of all random numbers.")]
Quick: TypeAlias = Annotated[bool, Option("--quick", help="Use small sizes, to see that it runs.")]
Threads: TypeAlias = Annotated[int | None, Option(help="Number of CPU threads for torch. Default: torch decides.")]
Out: TypeAlias = Annotated[
    Path | None, Option(help="Directory to write to.", show_default="bench, or bench/quick with --quick")
]
AsJson: TypeAlias = Annotated[bool, Option("--json", help="Print the record as JSON, and nothing else.")]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def full_dtype(name: str | None) -> str | None:
    """Return the name that torch has for a dtype, or raise a Problem that lists those that are known."""
    full = name if name is None else _SHORT.get(name, name)
    if full is not None and full not in DTYPES:
        raise Problem(f"dtype must be one of {', '.join((*_SHORT, *DTYPES))}, got {name!r}")
    return full


def check_sizes(**sizes: int | None) -> None:
    """Raise a Problem for a size that is not positive; None is one that was not given."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise Problem(f"{name} must be a positive integer, got {size}")


def given_fields(
    kind: str | None,
    ratio: float | None,
    dim: int | None,
    bits: int | None,
    block: int | None,
    center: bool,
    rotate: bool,
) -> dict[str, Any]:
    """Return the fields of a SketchConfig that the user gave."""
    fields = {"kind": kind, "ratio": ratio, "dim": dim, "bits": bits, "block": block}
    fields |= {"center": center or None, "rotate": rotate or None}
    return {name: value for name, value in fields.items() if value is not None}


def check_budget(budget: str | None, given: dict[str, Any]) -> None:
    """Raise a Problem if a budget is given together with a size, which the budget decides."""
    if budget is not None and (clash := [f"--{name}" for name in ("ratio", "dim") if name in given]):
        raise Problem(f"--budget finds the ratio: it excludes {', '.join(clash)}")


def parse_budget(text: str | None) -> str | float | int | None:
    """Return a bare number as an int or a float, and text with a unit or a % unchanged."""
    if text is None:
        return None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def set_threads(threads: int | None) -> None:
    """Set the number of torch's threads, if one was given."""
    if threads is None:
        return
    if threads < 1:
        raise Problem(f"threads must be a positive integer, got {threads}")
    torch.set_num_threads(threads)

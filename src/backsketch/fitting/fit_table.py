"""What a Fit says: one table, first whether it fits, last the Python to paste."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ..memory.live_storages import Place
from ..table import Table, readable
from .fit_result import Fit, FitRow, Spelled, in_python
from .largest_sizes import MOST_BATCH, MOST_LENGTH
from .roofline import ACCELERATORS
from .timeline import GATHER, REDUCE
from .ways import NO_NOISE

WIDE = 120  # columns from which on everything has room
_LONGEST = 9  # letters of a module's name


def as_text(found: Fit, columns: int, about: str = "", spelled: Spelled = in_python) -> str:
    """Return everything that there is to say, fitted to so many columns; ``about`` is the second line."""
    first, *others = lines_before(found, columns)
    width = min(columns, 120)
    before = [textwrap.fill(line, width) for line in (first, about, *others) if line]
    after = [line if line.startswith("  ") else textwrap.fill(line, width) for line in lines_after(found, spelled)]
    return "\n".join([*before, "", str(table_of(found, columns)), "", *after])


def table_of(found: Fit, columns: int) -> Table:
    """Return a row for each way; narrow tables leave out what is the same in all rows of a group."""
    unit, scale = found.unit
    wide = columns >= WIDE
    titles = [unit, *(("weights", "grads", "states") if wide else ()), "kept", "peak", "left", "batch"]
    titles += [*(("length",) if found.length is not None else ()), "time", "noise", *(("peak is in",) if wide else ())]
    rows: list[tuple[str, ...]] = []
    group = ""
    for row in found.rows:
        if row.group != group:
            group = row.group
            rows.append((group, *[""] * (len(titles) - 1)))
        fixed = (row.weights, row.gradients, row.states) if wide else ()
        left = (found.memory - row.peak.total) / scale
        cells = [(" " if group else "") + _name(row), *(f"{size / scale:.1f}" for size in fixed)]
        cells += [f"{row.activations / scale:.1f}", f"{row.peak.total / scale:.1f}", f"{left:+.1f}"]
        cells.append(f"{row.largest_batch}{'+' if row.largest_batch == MOST_BATCH else ''}")
        if found.length is not None:
            cells.append(_length(row, found))
        cells += [_time(row, found), row.noise, *((_where(row.peak.place),) if wide else ())]
        rows.append(tuple(cells))
    numeric = frozenset(range(1, titles.index("noise")))
    return Table(tuple(titles), tuple(rows), numeric=numeric)


def lines_before(found: Fit, columns: int) -> Iterator[str]:
    """Yield whether it fits, and what the table is about."""
    yield found.headline
    size = f"batch {found.batch}" + ("" if found.length is None else f", length {found.length}")
    ranks = "" if found.ranks == 1 else f" on each of {found.ranks} ranks (FSDP2)"
    yield f"A training step with {found.optimizer}, {size}{ranks}:"
    if columns < WIDE:
        for group, row in {row.group.split(", ")[0]: row for row in reversed(found.rows)}.items():
            sizes = (f"weights {readable(row.weights)}", f"gradients {readable(row.gradients)}")
            whose = f"{group}: " if group.startswith("LoRA") else ""
            if whose or row is found.rows[0]:
                yield f"{whose}{', '.join(sizes)}, states {readable(row.states)}, in every row."


def lines_after(found: Fit, spelled: Spelled = in_python) -> Iterator[str]:
    """Yield how to read the table, and last the best way as Python."""
    yield (
        "kept: activations held for backward. left: the card's memory less the peak. "
        + (
            "batch: the largest that fits."
            if found.length is None
            else "batch, length: the largest that fit, one at a time."
        )
    )
    yield "Tensors are counted: leave about a tenth of the card for the allocator and CUDA."
    if any("*" in _length(row, found) for row in found.rows):
        yield f"* as many as the model has positions for, {found.positions}."
    if any(row.largest_batch == MOST_BATCH or row.largest_length == MOST_LENGTH for row in found.rows):
        yield "+ and more: larger ones were not tried."
    exact = "exact training" if found.timed is found.rows[0] else found.timed.title
    if found.timed.measured_seconds is not None:
        others = any(found.relative_time(row) is None for row in found.rows)
        missing = "; - is not measured: with adapters, or out of memory" if others else ""
        yield f"time: of forward and backward, measured on this machine, as a multiple of {exact}{missing}."
    else:
        card = next(iter(ACCELERATORS))
        yield f"time: a multiple of exact training, computed for an {card} from flops and bytes moved, never run."
    if any("rest" in row.noise or row.noise[0].isdigit() for row in found.rows):
        yield (
            "noise: added to weight gradients, in units of the batch's own, without padding: a rule of thumb from one "
            "encoder, not measured on this model. What rest adds is not in it."
        )
    best = found.best
    if best is None:
        yield "What would help:"
        yield from (f"- {remedy}" for remedy in found.remedies(spelled))
        return
    quiet = next((row for row in found.rows if row.noise == NO_NOISE and found.fits(row)), None)
    if quiet is not None and best.noise != NO_NOISE:
        price = found.relative_time(quiet)
        yield f"Without noise: {quiet.title}{'' if price is None else f', {price:.2f} × the time of {exact}'}."
    yield f"Best for {_WISH[found.wish]}: {best.title}."
    code = "; ".join(best.code)
    yield from (f"  {line}" for name, line in _IMPORTS.items() if name in code)
    yield f"  {code or 'train as you do: nothing to change'}"


_IMPORTS = {"bs.": "import backsketch as bs", "get_peft_model": "from peft import LoraConfig, get_peft_model"}
_WISH = {
    "time": "the least time",
    "noise": "the least noise",
    "batch": "the largest batch",
    "length": "the largest length",
}


def _name(row: FitRow) -> str:
    some, of = row.checkpointed
    return f"+ {some}/{of} checkpointed" if 0 < some < of else row.way


def _length(row: FitRow, found: Fit) -> str:
    if row.largest_length is None:
        return ""
    sign = "*" if row.largest_length == found.positions else "+" if row.largest_length == MOST_LENGTH else ""
    return f"{row.largest_length}{sign}"


def _time(row: FitRow, found: Fit) -> str:
    relative = found.relative_time(row)
    return "-" if relative is None else f"{relative:.2f}"


def _where(place: Place | None) -> str:
    if place is None:
        return "the start"
    if place.phase == "optimizer":
        return "the optimiser"
    if place.op in (GATHER, REDUCE):
        return f"{place.phase} {place.op}"
    if not place.module:
        return f"{place.phase} loss"
    return f"{place.phase} {place.module.rpartition('.')[2][:_LONGEST]}"

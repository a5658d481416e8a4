"""The record of whole steps as tables: totals first, then every way to train in each part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from backsketch.memory.live_storages import ACTIVATIONS
from backsketch.table import Table

from .contenders import CHECKPOINTING, EXACT
from .whole_step import PARTS, PROCESSOR, Part
from .whole_step_subjects import SUBJECTS
from .whole_step_ways import WHOLE

MIB = 2**20
TOTALS = (EXACT.name, CHECKPOINTING.name, WHOLE.name)

Entry = Mapping[str, Any]


def totals(record: Mapping[str, Any]) -> Table:
    """Return kept, peak and time of exact training, checkpointing and the whole step, for each part."""
    titles = ("", "kept MiB", "peak MiB", "time of a step")
    rows = tuple(_total(PARTS[name], by_name(record, name)) for name in record["results"] if name in PARTS)
    notes = (f"Each: {' / '.join(TOTALS)}. The time of an exact step is 1.", *_notes(record))
    return Table(titles, rows, notes, numeric=frozenset(range(1, len(titles))))


def table(record: Mapping[str, Any], name: str) -> Table:
    """Return what every way to train costs in one part."""
    entries = by_name(record, name)
    exact = entries[EXACT.name]
    titles = ("", "kept MiB", "of exact", "peak MiB", "of exact", "of it activations", "time")
    rows = tuple(_row(entry, exact) for entry in entries.values())
    return Table(titles, rows, numeric=frozenset(range(1, len(titles))))


def title(record: Mapping[str, Any], name: str) -> str:
    """Say which model, type and batch a part has."""
    part = PARTS[name]
    subject, batch = SUBJECTS[part.subject], record["settings"]["batches"][part.subject].replace("x", "×")
    quick, few = record["settings"]["quick"], record["settings"]["timed blocks"]
    blocks = (3 if quick else subject.blocks) if part.deep else few
    return f"{subject.title}, {part.dtype}, {blocks} block{'s' * (blocks > 1)}, batch {batch}"


def by_name(record: Mapping[str, Any], part: str) -> dict[str, Entry]:
    """Return the name of a way -> its entry, in one part of the record."""
    return {entry["name"]: entry for entry in record["results"][part]["entries"]}


def _total(part: Part, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    chosen = [entries[name] for name in TOTALS]
    sizes = (" / ".join(f"{entry[what] / MIB:.0f}" for entry in chosen) for what in ("kept", "peak"))
    return (part.name.replace("-deep", ", all blocks"), *sizes, " / ".join(map(_time, chosen)))


def _row(entry: Entry, exact: Entry) -> tuple[str, ...]:
    sizes = (text for what in ("kept", "peak") for text in _size(entry[what], exact[what]))
    return (entry["name"], *sizes, f"{entry['parts'][ACTIVATIONS] / MIB:.0f}", _time(entry))


def _size(size: int, exact: int) -> Sequence[str]:
    return f"{size / MIB:.0f}", f"{size / exact:.0%}"


def _time(entry: Entry) -> str:
    return f"{entry['time']:.2f}" if "time" in entry else "-"


def _notes(record: Mapping[str, Any]) -> Iterator[str]:
    results = record["results"].values()
    if any(part["busy"] for part in results):
        yield "Others used the machine meanwhile: take times as a first look, not as a measurement."
    if any(part["clock"] == PROCESSOR for part in results):
        yield f"Times are {PROCESSOR} with threads={record['settings']['threads']}, which waiting does not lengthen."

"""The tables of whole steps for the pages, in Markdown, from the record alone. A test compares the pages with them.

Bytes are those of the whole model; times were taken on a few of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .contenders import CHECKPOINTING, EXACT
from .whole_step import PROCESSOR, Part
from .whole_step_subjects import SUBJECTS
from .whole_step_table import MIB, by_name
from .whole_step_ways import WHOLE

WAYS = {EXACT.name: "exact", CHECKPOINTING.name: "checkpointing", WHOLE.name: "**`sketch_(model, rest=True)`**"}
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
FIRST = (("encoder", "float32"), ("language-model", "bfloat16"))  # of the README
ALL = tuple((subject, dtype) for subject in ("encoder", "language-model") for dtype in SHORT)

Record = Mapping[str, Any]


def readme_table(record: Record) -> str:
    """Return the totals of one model in each type: a line for each way to train."""
    heads = [f"{_model(subject, record)}, {SHORT[dtype]}: kept | peak | time" for subject, dtype in FIRST]
    lines = [f"| | {' | '.join(heads)} |", _rule(6)]
    for way, text in WAYS.items():
        cells = (cell for subject, dtype in FIRST for cell in _cells(record, subject, dtype, way))
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_table(record: Record) -> str:
    """Return the totals of all models and types, with shares of what exact training has."""
    lines = ["| | | kept for backward | peak of the step | of it activations | time |", _rule(5)]
    for subject, dtype in ALL:
        head = f"{_model(subject, record)}, {SHORT[dtype]}"
        for place, (way, text) in enumerate(WAYS.items()):
            cells = _cells(record, subject, dtype, way, shares=way != EXACT.name)
            held = by_name(record, Part(subject, dtype, deep=True).name)[way]["parts"]["activations"]
            line = (head if place == 0 else "", text, *cells[:2], f"{held / MIB:.0f} MiB", cells[2])
            lines.append(f"| {' | '.join(line)} |".replace("|  |", "| |"))
    return "\n".join(lines)


def ways_table(record: Record) -> str:
    """Return every way to train a few blocks: shares of what exact training keeps and of its peak, and the time."""
    parts = [Part(subject, dtype) for subject, dtype in (*ALL, *(("dropout", dtype) for dtype in SHORT))]
    parts = [part for part in parts if part.name in record["results"]]
    heads = (f"{_kind(part.subject)}, {SHORT[part.dtype]}" for part in parts)
    lines = [f"| kept / peak / time | {' | '.join(heads)} |", _rule(len(parts))]
    for way in by_name(record, parts[0].name):
        cells = (_ratios(by_name(record, part.name), way) for part in parts)
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def remark(record: Record) -> str:
    """Say how the times were taken."""
    used, results = record["settings"], record["results"].values()
    threads = f"{used['threads']} thread{'s' * (used['threads'] > 1)}"
    how = f"Times are of {used['timed blocks']} blocks on {threads} of a CPU, the best of {used['rounds']} rounds"
    if any(part["clock"] == PROCESSOR for part in results):
        return f"{how}, in processor time, since others used the machine: take them as a first look."
    return f"{how}."


def pages(record: Record) -> Iterator[str]:
    """Yield what stands in the pages."""
    yield readme_table(record)
    yield memory_table(record)
    yield ways_table(record)
    yield remark(record)


def _cells(record: Record, subject: str, dtype: str, way: str, *, shares: bool = False) -> Sequence[str]:
    deep = by_name(record, Part(subject, dtype, deep=True).name)
    sizes = (_size(deep[way][what], deep[EXACT.name][what], shares) for what in ("kept", "peak"))
    return *sizes, f"{by_name(record, Part(subject, dtype).name)[way]['time']:.2f}"


def _size(size: int, exact: int, share: bool) -> str:
    return f"{size / MIB:.0f} MiB" + (f", {size / exact:.0%}" if share else "")


def _ratios(entries: Mapping[str, Mapping[str, Any]], way: str) -> str:
    own, exact = entries[way], entries[EXACT.name]
    return f"{own['kept'] / exact['kept']:.0%} / {own['peak'] / exact['peak']:.0%} / {own['time']:.2f}"


def _model(subject: str, record: Record) -> str:
    return f"{_kind(subject)}, {record['settings']['batches'][subject].replace('x', '×')}"


def _kind(subject: str) -> str:
    return SUBJECTS[subject].title.removesuffix(" without logits")


def _rule(columns: int) -> str:
    return "|" + "---|" * (columns + 1)

"""The counted launches as tables, one for each subject and type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from backsketch.table import Table, readable

from .launches import ANY

NOTES = (
    "launches: kernels of one step, forward and backward; moved: bytes they read and write",
    "A100, H100: time of a step relative to exact, estimated from launches, bytes and products; never run",
)


def tables(entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Table]]:
    """Yield a title and the table of each subject and type."""
    cases: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in entries:
        cases.setdefault((entry["subject"], entry["dtype"]), []).append(entry)
    for (subject, dtype), own in cases.items():
        yield f"{subject}, {dtype}", _table(own)


def _table(entries: Sequence[Mapping[str, Any]]) -> Table:
    devices = list(entries[0]["estimated_time"])
    exact = entries[0]["bytes"]
    rows = (
        (
            entry["way"],
            "" if entry["path"] == ANY else entry["path"],
            str(entry["launches"]),
            readable(entry["bytes"]),
            f"{entry['bytes'] / exact:.2f}",
            *(f"{entry['estimated_time'][device]:.2f}" for device in devices),
        )
        for entry in entries
    )
    titles = ("", "path", "launches", "moved", "/ exact", *(f"{device}, estimate" for device in devices))
    return Table(titles, tuple(rows), numeric=frozenset(range(2, len(titles))))

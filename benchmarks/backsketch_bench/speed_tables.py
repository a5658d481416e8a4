"""The speed record as tables, one section for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backsketch.table import Table

MIB = 2**20
RATIOS = (0.5, 0.2, 0.1)

Entries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Section:
    """What was measured in one part: its title, how, and the figures."""

    title: str
    text: str
    table: Table


def section(record: Mapping[str, Any], part: str) -> Section:
    """Return the section of one part of the record."""
    return _SECTIONS[part](record["results"][part], record["settings"])


def sections(record: Mapping[str, Any]) -> Iterator[tuple[str, Section]]:
    """Yield the name and section of every part that the record has."""
    return ((part, section(record, part)) for part in _SECTIONS if part in record["results"])


def _layers(entries: Entries, settings: Mapping[str, Any]) -> Section:
    families: dict[str, dict[float, float]] = {}
    for entry in entries:
        families.setdefault(entry["family"], {})[entry["ratio"]] = entry["speed"]
    rows = (
        (family, *(f"{speeds[ratio]:.2f}" if ratio in speeds else "" for ratio in (*RATIOS, 1)))
        for family, speeds in families.items()
    )
    text = f"B = {settings['layer rows']}, mean of 768 → 3072 and 3072 → 768: speed of a step, nn.Linear = 1."
    return Section("One layer", text, _table(("", "ρ = 0.5", "0.2", "0.1", "all rows"), rows))


def _encoder(entries: Entries, settings: Mapping[str, Any]) -> Section:
    return Section("Whole encoder", f"{_shapes(settings)}, without dropout.", _steps(entries))


def _dropout(entries: Entries, settings: Mapping[str, Any]) -> Section:
    text = (
        f"{_shapes(settings)}, with dropout 0.1. On a CPU torch draws its masks on one core and attention with dropout "
        "takes a slower path: linear layers are a smaller share of the step."
    )
    return Section("Whole encoder with dropout", text, _steps(entries))


def _shapes(settings: Mapping[str, Any]) -> str:
    blocks, batch = settings.get("encoder blocks", 12), settings["encoder batch"].replace("x", "×")
    return f"RoBERTa-base's shapes, {blocks} block{'s' * (blocks > 1)}, batch {batch}, forward and backward"


def _steps(entries: Entries) -> Table:
    rows = (
        (row["name"], f"{row['speed']:.2f}", f"{row['kept'] / MIB:.0f} MiB", f"{row['peak'] / MIB:.0f} MiB")
        for row in entries
    )
    return _table(("", "speed", "kept for backward", "peak"), rows)


def _transient(entries: Entries, settings: Mapping[str, Any]) -> Section:
    rows = ((row["name"], f"{row['beyond_linear'] / MIB:.1f} MiB", f"{row['kept'] / MIB:.1f} MiB") for row in entries)
    text = (
        f"B = {entries[0]['rows']}, 768 → 768: the peak of a step beyond nn.Linear's, where the input is held by "
        "someone else anyway, beside the bytes kept."
    )
    return Section("Transient memory", text, _table(("", "peak beyond nn.Linear", "kept"), rows))


def _growth(entries: Entries, settings: Mapping[str, Any]) -> Section:
    first, last = entries[0]["rows"][0], entries[0]["rows"][-1]
    rows = (
        (
            row["name"],
            f"{row['seconds'][0] * 1e3:.2f} ms",
            f"{row['seconds'][-1] * 1e3:.1f} ms",
            f"{row['slope']:.2f}",
            f"{row['last_slope']:.2f}",
        )
        for row in entries
    )
    text = (
        "Time of the sketch itself, 256 features, ρ = 0.1. The first sizes feel the cost of a call, the last ones that "
        "inputs no longer fit in the cache."
    )
    titles = ("", f"at {first} rows", f"at {last} rows", "log-log slope", "slope, last four sizes")
    return Section("Growth with the rows", text, _table(titles, rows))


def _overhead(entries: Entries, settings: Mapping[str, Any]) -> Section:
    rows = ((row["name"], f"{row['forward_us']:.0f} µs", f"{row['step_us']:.0f} µs") for row in entries)
    text = "64 rows, 64 → 64: the cost of a call."
    return Section("Tiny layers", text, _table(("", "forward", "forward + backward"), rows))


def _table(titles: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Table:
    return Table(titles, tuple(rows), numeric=frozenset(range(1, len(titles))))


_SECTIONS: dict[str, Callable[[Entries, Mapping[str, Any]], Section]] = {
    "layers": _layers,
    "encoder": _encoder,
    "dropout": _dropout,
    "transient": _transient,
    "growth": _growth,
    "overhead": _overhead,
}

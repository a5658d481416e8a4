"""The speed record as tables, one section for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from backsketch.table import Table

from .contenders import RATIOS

MIB = 2**20

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


def _layers(entries: Entries, settings: Mapping[str, Any], dtype: str) -> Section:
    shapes = list(entries[0]["speeds"])
    rows = ((entry["name"], *(f"{entry['speeds'][shape]:.2f}" for shape in shapes)) for entry in entries)
    text = f"B = {settings['layer rows']}: speed of a step, forward and backward; nn.Linear = 1, higher is faster."
    titles = ("", *(shape.replace("->", "→") for shape in shapes))
    return Section(f"One layer in {dtype}", text, _table(titles, rows))


def _allocators(entries: Entries, settings: Mapping[str, Any]) -> Section:
    text = (
        f"B = {settings['layer rows']}, 768 → 3072, fp32. By default glibc gives large blocks back to the system, and "
        "a step faults their pages in again: ways that allocate most, such as exact training, then look slower than "
        "they are. All other figures are taken while pages are kept, as every allocator of an accelerator does. Each "
        "allocator in a process of its own."
    )
    if not entries:
        text = "There is no glibc on this system, and its allocator serves as it is."
    rows = (
        (
            entry["name"],
            *(f"{entry[each]['speed']:.2f}" for each in ("keeping", "default")),
            *(f"{entry[each]['seconds'] * 1e3:.0f} ms" for each in ("keeping", "default")),
            *(f"{entry[each]['faults']:.0f}" for each in ("keeping", "default")),
        )
        for entry in entries
    )
    titles = ("", "speed", "by default", "a step", "by default", "page faults", "by default")
    return Section("What the allocator does to the comparison", text, _table(titles, rows))


def _kinds(entries: Entries, settings: Mapping[str, Any]) -> Section:
    families: dict[str, dict[float, float]] = {}
    for entry in entries:
        families.setdefault(entry["family"], {})[entry["ratio"]] = entry["speed"]
    rows = (
        (family, *(f"{speeds[ratio]:.2f}" for ratio in RATIOS))
        for family, speeds in families.items()
        if 1 not in speeds
    )
    text = f"B = {settings['layer rows']}, fp32, mean of 768 → 3072 and 3072 → 768: speed of a step, nn.Linear = 1."
    return Section("Kinds of sketches", text, _table(("", "ρ = 0.5", "0.2", "0.1"), rows))


def _encoder(entries: Entries, settings: Mapping[str, Any], dtype: str) -> Section:
    return Section(f"Whole encoder in {dtype}", f"{_shapes(settings)}, without dropout.", _steps(entries))


def _dropout(entries: Entries, settings: Mapping[str, Any]) -> Section:
    text = (
        f"{_shapes(settings)}, fp32, with dropout 0.1. On a CPU torch draws its masks on one core and attention "
        "with dropout takes a slower path: linear layers are a smaller share of the step."
    )
    return Section("Whole encoder with dropout", text, _steps(entries))


def _shapes(settings: Mapping[str, Any]) -> str:
    blocks, batch = settings.get("encoder blocks", 12), settings["encoder batch"].replace("x", "×")
    return f"RoBERTa-base's shapes, {blocks} block{'s' * (blocks > 1)}, batch {batch}, forward and backward"


def _steps(entries: Entries) -> Table:
    rows = (
        (
            row["name"],
            f"{row['speed']:.2f}",
            f"{row['seconds']:.2f} s",
            f"{row['kept'] / MIB:.0f} MiB",
            f"{row['peak'] / MIB:.0f} MiB",
        )
        for row in entries
    )
    return _table(("", "speed", "a step", "kept for backward", "peak"), rows)


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
    "layers": partial(_layers, dtype="fp32"),
    "layers-bfloat16": partial(_layers, dtype="bf16"),
    "allocators": _allocators,
    "kinds": _kinds,
    "encoder": partial(_encoder, dtype="fp32"),
    "encoder-bfloat16": partial(_encoder, dtype="bf16"),
    "dropout": _dropout,
    "transient": _transient,
    "growth": _growth,
    "overhead": _overhead,
}

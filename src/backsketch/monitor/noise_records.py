"""Running sums of what the monitor measures, and the records and the table made from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from ..sketches.law import RowBlocks
from ..table import Table
from .estimates import QUANTITIES, RECORDED, quantities

Record: TypeAlias = dict[str, str | int | float]

_COLUMNS = ("alignment", "sgd_variance", "sketch_variance", "ratio")


@dataclass(slots=True)
class Sums:
    """Totals over the calls of one layer in one step.

    ``waiting`` holds calls whose numbers are still on the device; ``passes`` when each call ran forward and backward.
    """

    calls: int = 0
    sketched: int = 0
    rows: int = 0
    valid: int = 0
    dim: int = 0
    totals: list[float] = field(default_factory=lambda: [0.0] * len(RECORDED))
    waiting: list[tuple[RowBlocks, int, Tensor]] = field(default_factory=list)
    passes: list[tuple[int, int]] = field(default_factory=list)

    def add(self, blocks: RowBlocks, rows: int, valid: int, sketched: bool, measured: Tensor) -> None:
        """Count one call, ``sketched`` or with its input kept in another way, without waiting for its numbers."""
        self.calls += 1
        self.sketched += sketched
        self.rows += rows
        self.valid += valid
        self.dim += blocks.dim
        self.waiting.append((blocks, rows, measured))

    @property
    def held(self) -> int:
        """Return of how many calls the input was kept at one time, the most of them."""
        changes = sorted((at, change) for both in self.passes for at, change in zip(both, (1, -1), strict=True))
        return max(accumulate(change for _, change in changes), default=0)

    def record(self, step: int, layer: str) -> Record:
        """Return the totals under their names, with the ratios that follow from them."""
        totals = dict(zip(RECORDED, self.totals, strict=True))
        calls = {"calls": self.calls, "sketched_calls": self.sketched, "held_calls": self.held}
        sizes = {**calls, "rows": self.rows, "valid_rows": self.valid, "dim": self.dim}
        return {"step": step, "layer": layer, **sizes, **ratios(totals)}


def settle(sums: Iterable[Sums]) -> None:
    """Fetch the waiting numbers, all of a device at once, and add them to the totals."""
    groups: dict[torch.device, list[tuple[Sums, RowBlocks, int, Tensor]]] = {}
    for total in sums:
        for blocks, rows, measured in total.waiting:
            groups.setdefault(measured.device, []).append((total, blocks, rows, measured))
        total.waiting = []
    for group in groups.values():
        numbers = iter(torch.cat([measured for _, _, _, measured in group]).tolist())
        for total, blocks, rows, measured in group:
            found = quantities(blocks, rows, [next(numbers) for _ in range(len(measured))])
            total.totals = [old + new for old, new in zip(total.totals, found, strict=True)]


def ratios(totals: Mapping[str, float]) -> dict[str, float]:
    """Return the totals with their ratios: α, D²_sketch / D²_SGD, and both sides of the paper's Theorem 1."""
    alignment = _divide(totals["squared_gradient"], totals["energy"])
    return {
        **totals,
        "alignment": alignment,
        "ratio": _divide(totals["sketch_variance"], totals["sgd_variance"]),
        "scaled_ratio": _divide(totals["scaled_variance"], totals["sgd_variance"]),
        "bound": _divide(alignment + 1, alignment),
    }


def with_variance(records: Sequence[Record]) -> Sequence[Record]:
    """Return the records that have a variance, which a batch of one row has not; all if none has one."""
    return [record for record in records if not math.isnan(float(record["sgd_variance"]))] or records


def add_up(records: Sequence[Record]) -> dict[str, float]:
    """Return the sums over the records that have a variance."""
    known = with_variance(records)
    return {name: sum(float(record[name]) for record in known) for name in QUANTITIES}


def by_layer(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return layer -> its records, layers in the order of their first record."""
    layers: dict[str, list[Record]] = {}
    for record in records:
        layers.setdefault(str(record["layer"]), []).append(record)
    return layers


def headline(records: Sequence[Record]) -> str:
    """Return one line on the whole model: added noise / SGD's noise of all layers, by family, and of the worst.

    A family is all layers whose names end alike, as ``query``; the line has the families of several layers.
    """
    layers = {layer: _ratio(own) for layer, own in by_layer(records).items()}
    steps = len({record["step"] for record in records})
    families: dict[str, list[Record]] = {}
    for record in records:
        families.setdefault(str(record["layer"]).rpartition(".")[2], []).append(record)
    seen = f"{_count(len(layers), 'layer')}, {_count(steps, 'step')}"
    parts = [f"added noise / SGD's noise {_figure(_ratio(records), 3)} ({seen})"]
    if 1 < len(families) < len(layers):
        parts.append(", ".join(f"{family} {_figure(_ratio(own), 3)}" for family, own in families.items()))
    if len(layers) > 1:
        known = [layer for layer, ratio in layers.items() if not math.isnan(ratio)] or list(layers)
        worst = max(known, key=lambda layer: layers[layer])
        parts.append(f"most {_figure(layers[worst], 3)} in {worst}")
    return "; ".join(parts)


def table(records: Sequence[Record]) -> str:
    """Lay out one line a layer: variances averaged over steps, ratios of the totals."""
    titles = ("layer", "steps", "calls", "alignment", "D² SGD", "D² sketch", "ratio")
    rows = tuple(_line(layer, own) for layer, own in by_layer(records).items())
    return str(Table(titles, rows, numeric=frozenset(range(1, len(titles)))))


def _line(layer: str, records: list[Record]) -> tuple[str, ...]:
    known = with_variance(records)
    totals = ratios(add_up(known))
    for name in ("sgd_variance", "sketch_variance"):
        totals[name] /= len(known)
    calls = sum(int(record["calls"]) for record in records)
    return layer, str(len(records)), str(calls), *(_figure(totals[name], 4) for name in _COLUMNS)


def _ratio(records: Sequence[Record]) -> float:
    return ratios(add_up(records))["ratio"]


def _figure(value: float, digits: int) -> str:
    """Write a figure; a batch of one row has no variance, and a gradient of zero no ratio."""
    return "unknown" if math.isnan(value) else f"{value:.{digits}g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan

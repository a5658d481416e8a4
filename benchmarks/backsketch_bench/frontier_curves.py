"""The curves of the frontier's figure: which points of a record belong to one, how it is drawn, where its label is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_STEP = 1.1  # a little more than between the shares that a record tries
_PAPER, _BEST, _ROWS, _BEFORE = "#c0392b", "#0b7a75", "#5b6570", "#b3730a"


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (share, noise), and a label that stands ``offset`` printer's points from the one ``near`` a share."""

    points: tuple[tuple[float, float], ...]
    label: str
    color: str
    near: float
    offset: tuple[float, float]
    align: str = "left"
    width: float = 1.6
    style: str | tuple[int, tuple[int, ...]] = "-"
    marker: str = ""


def curves(record: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> list[Curve]:
    """Return the curves that have points; ``before`` is a record of earlier storage, of which the best is one curve."""
    results = record["results"]
    family = {name: _points([p for p in results["points"] if p["family"] == name]) for name in ("paper", "rows")}
    best, left_out = (_staircase(results, masked) for masked in (False, True))
    earlier = () if before is None else _least_of_budgets(before["results"]["budgets"])
    found = [
        Curve(family["rows"], "random rows, not rounded", _ROWS, 0.1, (-12, -7), "right", marker="o"),
        Curve(earlier, "few bits, release 0.1", _BEFORE, 0.125, (8, 2), marker="o"),
        Curve(left_out, "this library,\npadding left out", _BEST, 0.073, (-10, -2), "right", 1.8, (0, (4, 2))),
        Curve(best, "this library:\nrows in few bits", _BEST, 0.133, (10, 21), "left", 3.2),
        Curve(family["paper"], "the paper's Gaussian", _PAPER, 0.2, (4, 14), "left", 2.8, marker="s"),
    ]
    return [curve for curve in found if curve.points]


def _points(points: list[dict[str, Any]]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((point["bytes"], point["noise"]) for point in points))


def _staircase(results: Mapping[str, Any], masked: bool) -> tuple[tuple[float, float], ...]:
    """Return the least noise at each share; across a gap it is held, never drawn lower."""
    tried = [*results["best"], *(point for own in results["budgets"].values() for point in own)]
    points = _points([point for point in tried if point["masked"] is masked])
    lower = [(share, noise) for share, noise in points if all(noise <= n for s, n in points if s <= share)]
    steps = [(after, noise) for (share, noise), (after, _) in pairwise(lower) if after > _STEP * share]
    return tuple(sorted({*lower, *steps}, key=lambda point: (point[0], -point[1])))


def _least_of_budgets(budgets: Mapping[str, list[dict[str, Any]]]) -> tuple[tuple[float, float], ...]:
    """Return what each budget reached without leaving padding out."""
    best = (min((p for p in own if not p["masked"]), key=lambda p: p["noise"]) for own in budgets.values())
    return _points(list(best))

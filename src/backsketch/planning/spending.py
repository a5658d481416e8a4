"""Spend a budget of bytes where it removes most noise: one point for each item, along lower convex hulls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class Point(Generic[Choice]):
    """A choice, the bytes it costs and the noise it has."""

    choice: Choice
    bytes: int
    noise: float


def spend(items: Sequence[Sequence[Point[Choice]]], budget: int) -> list[Point[Choice]]:
    """Choose one point of each item so that all cost at most ``budget`` bytes and have nearly the least noise.

    Every item starts at its cheapest point and moves along its hull. The step that removes most noise per byte comes
    first. This is optimal until a step no longer fits; smaller steps then spend what is left.
    """
    hulls = [lower_hull(points) for points in items]
    position = [0] * len(hulls)
    left = budget - sum(hull[0].bytes for hull in hulls)
    if left < 0:
        raise ValueError(f"budget must be at least {budget - left} bytes, got {budget}")
    steps = [
        ((hull[at].noise - hull[at + 1].noise) / (hull[at + 1].bytes - hull[at].bytes), item, at)
        for item, hull in enumerate(hulls)
        for at in range(len(hull) - 1)
    ]
    for _, item, at in sorted(steps, key=lambda step: (-step[0], step[1:])):
        price = hulls[item][at + 1].bytes - hulls[item][at].bytes
        if position[item] == at and price <= left:
            position[item] = at + 1
            left -= price
    return [hull[at] for hull, at in zip(hulls, position, strict=True)]


def reach(items: Sequence[Sequence[Point[Choice]]], noise: float) -> list[Point[Choice]]:
    """Choose one point of each item so that all have at most ``noise`` and cost nearly the least bytes.

    Steps along the hulls are taken as in ``spend``, until the noise is low enough. What the last of them removed too
    much is given back: each item moves to its cheapest point with which the noise stays low enough. If no choice has so
    little noise, each item has its quietest point.
    """
    hulls = [lower_hull(points) for points in items]
    chosen = [hull[0] for hull in hulls]
    total = sum(point.noise for point in chosen)
    steps = [
        ((hull[at].noise - hull[at + 1].noise) / (hull[at + 1].bytes - hull[at].bytes), item, at)
        for item, hull in enumerate(hulls)
        for at in range(len(hull) - 1)
    ]
    for _, item, at in sorted(steps, key=lambda step: (-step[0], step[1:])):
        if total <= noise:
            break
        chosen[item] = hulls[item][at + 1]
        total = sum(point.noise for point in chosen)
    for item, points in enumerate(items):
        most = noise - sum(point.noise for index, point in enumerate(chosen) if index != item)
        fitting = [point for point in points if point.noise <= most]
        chosen[item] = min((*fitting, chosen[item]), key=lambda point: point.bytes)
    return chosen


def lower_hull(points: Sequence[Point[Choice]]) -> list[Point[Choice]]:
    """Return the points on the lower convex hull, by rising bytes and falling noise."""
    hull: list[Point[Choice]] = []
    for point in sorted(points, key=lambda point: (point.bytes, point.noise)):
        if hull and point.noise >= hull[-1].noise:
            continue
        while len(hull) > 1 and _above(hull[-1], hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _above(middle: Point[Choice], first: Point[Choice], last: Point[Choice]) -> bool:
    """Tell whether ``middle`` is on or above the line from ``first`` to ``last``."""
    share = (middle.bytes - first.bytes) / (last.bytes - first.bytes)
    return middle.noise >= first.noise + share * (last.noise - first.noise)

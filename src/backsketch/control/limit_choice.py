"""What each group of layers should keep, so that the added noise holds a limit within a budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from ..config import STORED_BITS, SketchConfig, check_config
from ..convert.left_exact import in_features, weight_of
from ..linear.keeping import kept_bytes
from ..planning.spending import Point, reach, spend
from .layer_averages import LayerAverages

RATIOS = tuple(step / 100 for step in range(1, 101))

Group = tuple[str, ...]


class GroupChoice:
    """The choices of layers that share an input: each a config with the bytes it keeps and the noise it adds."""

    def __init__(self, group: Group, layers: Mapping[str, nn.Module], averages: Mapping[str, LayerAverages]) -> None:
        self.group = group
        self.config = check_config(layers[group[0]].config)
        self._own = [averages[name] for name in group]
        first = layers[group[0]]
        self._features, self._itemsize = in_features(first), weight_of(first).dtype.itemsize

    @property
    def governed(self) -> bool:
        """Tell whether the layers keep what their config says."""
        return any(own.sketched for own in self._own)

    @property
    def sgd(self) -> float:
        """Return SGD's noise of the layers."""
        return sum(max(own.sgd, 0.0) for own in self._own)

    def point(self, config: SketchConfig) -> Point[SketchConfig]:
        """Return what the layers keep in a step, and the noise they add, under ``config``."""
        own = self._own[0]
        size = own.calls * kept_bytes(config, own.call_rows, self._features, self._itemsize) if self.governed else 0
        return Point(config, round(size), sum(each.added(config) for each in self._own))

    @property
    def exact_bytes(self) -> int:
        """Return what an exact layer would keep of the input in a step."""
        own = self._own[0]
        return round(own.rows * self._features * self._itemsize) if self.governed else 0

    def points(self, most: float) -> list[Point[SketchConfig]]:
        """Return all choices with at most ``most`` times SGD's noise; the quietest one in any case."""
        if not self.governed:
            return [self.point(self.config)]
        base = replace(self.config, dim=None)
        found = [self.point(replace(base, ratio=ratio, bits=bits)) for bits in STORED_BITS for ratio in RATIOS]
        quietest = min(found, key=lambda point: point.noise)
        return [point for point in found if point.noise <= most * self.sgd] or [quietest]


def choose(
    groups: Sequence[GroupChoice], *, noise: float, most: float, budget: int
) -> tuple[list[Point[SketchConfig]], bool]:
    """Return a choice for each group, and whether it has at most ``noise``, as the budget may not allow it.

    No group has more than ``most`` times SGD's own noise, unless the budget is too small for that.
    """
    chosen = reach([group.points(most) for group in groups], noise)
    if sum(point.bytes for point in chosen) <= budget:
        return chosen, sum(point.noise for point in chosen) <= noise
    return spend([group.points(float("inf")) for group in groups], budget), False

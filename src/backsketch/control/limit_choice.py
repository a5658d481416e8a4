"""What each group of layers should keep, so that the added noise holds a limit within a budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from ..config import STORED_BITS, SketchConfig, check_config
from ..convert.left_exact import in_features, weight_of
from ..linear.keeping import kept_bytes
from ..planning.spending import Point, lower_hull, reach, spend
from .layer_averages import LayerAverages

RATIOS = tuple(step / 100 for step in range(1, 101))
_LITTLE_PADDING = 2.0  # what the noise of a batch with little padding counts beside that of a mean batch

_HALVINGS = 16  # of the interval in which the noise is looked for that has the right mean

Group = tuple[str, ...]
Configured = Point[SketchConfig]


class GroupChoice:
    """The choices of layers that share an input: each a config with the bytes it keeps and the noise it adds."""

    def __init__(self, group: Group, layers: Mapping[str, nn.Module], averages: Mapping[str, LayerAverages]) -> None:
        self.group = group
        self._configs = [check_config(layers[name].config) for name in group]
        self.config = self._configs[0]
        self._own = [averages[name] for name in group]
        first = layers[group[0]]
        self._features, self._itemsize = in_features(first), weight_of(first).dtype.itemsize

    @property
    def governed(self) -> bool:
        """Tell whether the layers keep what their config says."""
        return any(own.sketched for own in self._own)

    @property
    def united(self) -> bool:
        """Tell whether the layers have one config, and so keep one sketch."""
        return len(set(self._configs)) == 1

    @property
    def sgd(self) -> float:
        """Return SGD's noise of the layers."""
        return sum(max(own.sgd, 0.0) for own in self._own)

    @property
    def now(self) -> Configured:
        """Return what the layers keep and add under their configs of now."""
        size = sum(self.point(config).bytes for config in set(self._configs))
        return Point(self.config, size, sum(map(LayerAverages.added, self._own, self._configs)))

    def point(self, config: SketchConfig) -> Configured:
        """Return what the layers keep at one time, and the noise they add in a mean batch, under ``config``."""
        return Point(config, self._bytes(config), sum(each.added(config) for each in self._own))

    @property
    def exact_bytes(self) -> int:
        """Return what an exact layer would keep of the input at one time."""
        first = self._most_measured
        return round(first.held * first.call_rows * self._features * self._itemsize) if self.governed else 0

    def points(self, most: float, little_padding: float = 0.0) -> list[Configured]:
        """Return all choices with at most ``most`` times SGD's noise in a mean batch; the quietest one in any case.

        The noise of a point is that of a mean batch plus ``little_padding`` times that of a batch with little padding.
        """
        if not self.governed:
            noise = sum(each.added(self.config, little_padding) for each in self._own)
            return [Point(self.config, 0, noise)]
        found, allowed = [], []
        for ratio in RATIOS:
            first = replace(self.config, dim=None, ratio=ratio)
            growths = [each.growths(first.dim_for(each.call_rows)) for each in self._own]
            for bits in STORED_BITS:
                config = replace(first, bits=bits)
                mean, both = (
                    sum(own.added_if(grown, config, weight) for own, grown in zip(self._own, growths, strict=True))
                    for weight in (0.0, little_padding)
                )
                found.append(Point(config, self._bytes(config), both))
                if mean <= most * self.sgd:
                    allowed.append(found[-1])
        return allowed or [min(found, key=lambda point: point.noise)]

    @property
    def _most_measured(self) -> LayerAverages:
        return max(self._own, key=lambda own: own.measured)

    def _bytes(self, config: SketchConfig) -> int:
        own = self._most_measured
        return (
            round(own.held * kept_bytes(config, own.call_rows, self._features, self._itemsize)) if self.governed else 0
        )


def choose(groups: Sequence[GroupChoice], *, noise: float, most: float, budget: int) -> tuple[list[Configured], bool]:
    """Return a choice for each group, and whether a mean batch has at most ``noise``, which the budget may not allow.

    The bytes are the least with which a mean batch and one with little padding, which counts twice, together have at
    most some noise: as much as leaves ``noise`` to the mean batch. No group has more than ``most`` times SGD's own
    noise in a mean batch, unless the budget is too small for that.
    """
    hulls = [lower_hull(group.points(most, _LITTLE_PADDING)) for group in groups]

    def chosen_for(both: float) -> list[Configured]:
        return [group.point(point.choice) for group, point in zip(groups, reach(hulls, both), strict=True)]

    low, high = 0.0, sum(hull[0].noise for hull in hulls)
    chosen = chosen_for(high)
    if _noise(chosen) > noise:
        chosen = chosen_for(low)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = chosen_for(middle)
            if _noise(found) <= noise:
                low, chosen = middle, found
            else:
                high = middle
    if sum(point.bytes for point in chosen) <= budget:
        return chosen, _noise(chosen) <= noise
    return spend([group.points(float("inf")) for group in groups], budget), False


def _noise(points: Sequence[Configured]) -> float:
    return sum(point.noise for point in points)

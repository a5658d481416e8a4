"""Into which groups of features a row is cut; each group has its own range."""

from __future__ import annotations

from collections.abc import Iterator

GROUP = 128


def group_count(features: int) -> int:
    """Return how many groups one row has."""
    return -(-features // GROUP)


def parts_of(features: int) -> Iterator[tuple[slice, slice]]:
    """Yield (columns, groups) for the groups of full size, and then for a last one that is shorter."""
    full = features // GROUP
    if full:
        yield slice(0, full * GROUP), slice(0, full)
    if features % GROUP:
        yield slice(full * GROUP, features), slice(full, full + 1)


def group_sizes(groups: slice, columns: int) -> tuple[int, int]:
    """Return how many groups these columns are, and how many values each has."""
    count = groups.stop - groups.start
    return count, columns // count

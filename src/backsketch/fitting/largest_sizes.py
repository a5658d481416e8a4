"""The largest batch and the largest length whose step fits, in one way to train."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .growth import Growth, largest
from .rank_share import RankShare
from .subject import WaySteps
from .timeline import Timeline

MOST_BATCH, MOST_LENGTH = 2**20, 2**24  # sizes that nobody needs


def largest_batch(
    steps: WaySteps, batch: int, length: int | None, checkpointed: int, *, share: RankShare, memory: int
) -> int:
    """Return the largest batch at a length, starting at ``batch``; 0 if none fits."""
    return _largest(
        lambda size: steps.at(size, length, checkpointed), (batch, 3 * batch), share=share, memory=memory,
        most=MOST_BATCH,
    )  # fmt: skip


def largest_length(
    steps: WaySteps, batch: int, length: int, checkpointed: int, *, share: RankShare, memory: int, most: int
) -> int:
    """Return the largest length with a batch, starting at ``length``, at most ``most``; 0 if none fits."""
    sizes: Sequence[int] = (length, 2 * length, 4 * length)
    if max(sizes) > most:
        sizes = tuple(dict.fromkeys((length, -(-length // 2), -(-length // 4))))
    return _largest(
        lambda size: steps.at(batch, size, checkpointed), sizes, share=share, memory=memory, most=most
    )  # fmt: skip


def _largest(at: Callable[[int], Timeline], sizes: Sequence[int], *, share: RankShare, memory: int, most: int) -> int:
    grown = Growth(sizes, at, share)
    return largest(
        grown.measured, memory, sizes=sizes, most=most, predict=grown.peak, trusted=lambda: grown.foreseeable
    )

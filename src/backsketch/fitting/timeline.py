"""Timeline: the log of a whole step, and its peak on one of several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..memory.live_storages import GRADIENTS, OPTIMIZER_STATES, PARAMETERS, ROLES, Place
from .launch_counter import Kernel
from .rank_share import RankShare
from .segment import BACKWARD, FORWARD, Segment

GATHERED = "gathered"
GATHER, REDUCE = "gather", "reduce"  # moments at which no operation of the model runs
_GRADIENTS = ROLES.index(GRADIENTS)


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The moment at which a rank holds most bytes: role -> bytes, and where it is."""

    parts: dict[str, int]
    place: Place | None

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Timeline:
    """The segments of a step in order; ``blocks`` tells which block of the whole model each belongs to."""

    segments: tuple[Segment, ...]
    blocks: tuple[int | None, ...]

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Timeline:
        return cls(tuple(segments), tuple(each.block for each in segments))

    @property
    def kept(self) -> int:
        """Return the bytes that are held for backward when forward ends."""
        return sum(each.kept for each in self.segments)

    @property
    def kernels(self) -> list[Kernel]:
        return [kernel for each in self.segments for kernel in each.kernels]

    @property
    def in_order(self) -> bool:
        """Tell whether each block ran once, in order, and its backward once, in reverse order."""
        phases = [(each.phase, block) for each, block in zip(self.segments, self.blocks, strict=True)]
        forward = [block for phase, block in phases if phase == FORWARD]
        backward = [block for phase, block in phases if phase == BACKWARD]
        return bool(forward) and forward == list(range(len(forward))) and backward == forward[::-1]

    def deeper(self, extra: Mapping[int, int]) -> Timeline:
        """Return the step of a deeper model: block b stands ``extra[b]`` times more, beside itself."""
        segments = [each for each in self.segments for _ in range(1 + extra.get(_number(each), 0))]
        depth = sum(each.phase == FORWARD for each in segments)
        forward, backward = iter(range(depth)), iter(reversed(range(depth)))
        numbers = {FORWARD: forward, BACKWARD: backward}
        return Timeline(
            tuple(segments), tuple(next(numbers[s.phase]) if s.phase in numbers else None for s in segments)
        )

    def matches(self, other: Timeline) -> bool:
        """Tell whether two steps have the same events in the same roles, whatever their bytes."""
        return len(self.segments) == len(other.segments) and all(
            torch.equal(one.roles, two.roles) for one, two in zip(self.segments, other.segments, strict=True)
        )

    def peak(self, share: RankShare) -> StepPeak:
        """Return the peak of the step on a rank that holds ``share`` of the model."""
        live = torch.zeros(len(ROLES), dtype=torch.float64)
        live[ROLES.index(PARAMETERS)] += share.weights
        live[ROLES.index(OPTIMIZER_STATES)] += share.states
        highest = _Highest(live)
        for segment, block in zip(self.segments, self.blocks, strict=True):
            around, inside, after = share.around(segment.phase, block), segment.inside, segment.after
            highest.see(live, around.start, Place(segment.phase, None, GATHER))
            highest.see(live + inside.highest, around.inside, inside.place)
            highest.see(live + inside.by_role, around.end, Place(segment.phase, None, REDUCE))
            added = inside.by_role.clone()
            if segment.phase == BACKWARD:  # reduced over the ranks when the block is done
                added[_GRADIENTS] *= share.gradient_share(block)
            live = live + added
            highest.see(live + after.highest, around.after, after.place)
            live = live + after.by_role
        highest.see(live, share.last, Place(BACKWARD, None, REDUCE))
        live[_GRADIENTS] = min(float(live[_GRADIENTS]), share.gradients)
        highest.see(live, 0, Place("optimizer", None, "step"))
        found, gathered_then, place = highest.live, highest.gathered, highest.place
        parts = {role: round(float(size)) for role, size in zip(ROLES, found, strict=True)}
        return StepPeak(parts | ({GATHERED: gathered_then} if share.ranks > 1 else {}), place)


class _Highest:
    """The moment with most bytes so far."""

    def __init__(self, live: Tensor) -> None:
        self.live, self.gathered = live, 0
        self.place: Place | None = None
        self._total = -1.0

    def see(self, live: Tensor, gathered: int, place: Place | None) -> None:
        """Take note of a moment."""
        if (total := float(live.sum()) + gathered) > self._total:
            self._total, self.live, self.gathered, self.place = total, live.clone(), gathered, place


def with_changes(timeline: Timeline, changes: Sequence[Tensor]) -> Timeline:
    """Return the same step with other bytes."""
    segments: dict[int, Segment] = {}
    for segment, own in zip(timeline.segments, changes, strict=True):
        segments.setdefault(id(segment), replace(segment, changes=own))
    return Timeline(tuple(segments[id(each)] for each in timeline.segments), timeline.blocks)


def _number(segment: Segment) -> int:
    return -1 if segment.block is None else segment.block

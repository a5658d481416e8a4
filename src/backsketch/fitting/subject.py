"""Subject: a model to fit, and its steps at any size, with the blocks that it has or with few that stand for all."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import nn

from ..memory.training_step import Loss, forward_to_loss
from .batches import BatchMaker
from .depth import with_few_blocks
from .step_log import record_step
from .timeline import Timeline
from .ways import ALL, NONE, SOME, Way

# So many blocks run where blocks are alike, of each kind: the first, one that stands for those between, and the last.
ALIKE, OF_TWO_KINDS = 3, 6


@dataclass(frozen=True)
class Subject:
    """A model on the meta device, the names of its blocks, batches for it and its loss."""

    model: nn.Module
    blocks: tuple[str, ...]
    batches: BatchMaker
    loss: Loss | None

    @property
    def depth(self) -> int:
        return len(self.blocks)

    def step(
        self, model: nn.Module, blocks: Sequence[str], batch: int, length: int | None, kernels: bool = False
    ) -> Timeline:
        """Run one step of a copy of the model."""
        args, kwargs = self.batches(batch, length)
        forward = partial(forward_to_loss, model, args, kwargs, self.loss)
        try:
            return Timeline.of(record_step(model, blocks, forward, kernels=kernels))
        except RuntimeError as error:
            size = f"batch {batch}" + ("" if length is None else f", length {length}")
            reason = str(error).split("\n", 1)[0][:200].rstrip(".")
            raise RuntimeError(_FAILED.format(model=type(model).__name__, size=size, reason=reason)) from error


class WaySteps:
    """The steps of a subject that trains in one way.

    Args:
        subject: what trains.
        way: how.
        few: whether to run few blocks for many.
    """

    def __init__(self, subject: Subject, way: Way, *, few: bool) -> None:
        self._subject, self._way = subject, way
        self._models: dict[int, nn.Module] = {}
        self._logs: dict[tuple[int, int | None, int, bool], Timeline] = {}
        count = OF_TWO_KINDS if way.checkpointed == SOME else ALIKE
        self._few = with_few_blocks(subject.model, subject.blocks, count) if few else None
        if self._few is not None:
            checkpointed = {SOME: count // 2, ALL: count}.get(way.checkpointed, 0)
            way.apply(self._few, subject.blocks[:checkpointed])

    @property
    def runs_few(self) -> bool:
        """Tell whether few blocks run for many."""
        return self._few is not None

    @property
    def choices(self) -> range:
        """Return the numbers of blocks that may be checkpointed where some are; none may be too."""
        if self._few is not None:
            return range(OF_TWO_KINDS // 2, self._subject.depth - OF_TWO_KINDS // 2 + 1)
        return range(1, max(2, self._subject.depth))

    def at(self, batch: int, length: int | None, checkpointed: int, *, kernels: bool = False) -> Timeline:
        """Return the step at a size, with the first ``checkpointed`` blocks checkpointed."""
        if self._few is None:
            return self._logged(batch, length, checkpointed, kernels)
        if self._way.checkpointed == SOME and not checkpointed:
            return self._without.at(batch, length, 0, kernels=kernels)
        log, missing = self._logged(batch, length, -1, kernels), self._subject.depth
        if self._way.checkpointed == SOME:
            half = OF_TWO_KINDS // 2
            return log.deeper({1: checkpointed - half, half + 1: missing - checkpointed - half})
        return log.deeper({1: missing - ALIKE})

    def _logged(self, batch: int, length: int | None, checkpointed: int, kernels: bool) -> Timeline:
        for key in ((batch, length, checkpointed, True), (batch, length, checkpointed, kernels)):
            if key in self._logs:
                return self._logs[key]
        model = self._few if self._few is not None else self._whole(checkpointed)
        blocks = self._subject.blocks if self._few is None else self._subject.blocks[: self._blocks_run]
        found = self._subject.step(model, blocks, batch, length, kernels)
        self._logs[batch, length, checkpointed, kernels] = found
        return found

    @cached_property
    def _without(self) -> WaySteps:
        """Return the same way with no block checkpointed, which needs other blocks to stand for all."""
        return WaySteps(self._subject, replace(self._way, checkpointed=NONE), few=True)

    @property
    def _blocks_run(self) -> int:
        return OF_TWO_KINDS if self._way.checkpointed == SOME else ALIKE

    def _whole(self, checkpointed: int) -> nn.Module:
        if checkpointed not in self._models:
            model = copy.deepcopy(self._subject.model)
            self._way.apply(model, self._subject.blocks[:checkpointed])
            self._models[checkpointed] = model
        return self._models[checkpointed]


_FAILED = (
    "a step of {model} with {size} failed on the meta device, which has shapes and no values: {reason}. fit needs a "
    "forward that reads no values, as .item() and nonzero do, and takes batches of any size; profile and peak_memory "
    "measure a step of a model with values"
)

"""Train all contenders side by side: one step of each in turn, on the same batch, from the same weights."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from .contenders import CONTENDERS, EXACT, Contender
from .measuring import Memory, make_optimizer, measure_memory, measure_noise, profile_exact
from .model import ByteModel, next_byte_loss
from .scale import Scale
from .text import Text

WARMUP = 2  # steps that are not timed


@dataclass(slots=True)
class Lane:
    """One contender's model in training, and what was measured so far.

    Attributes:
        seconds, losses: of every step.
        own_seconds: the part of ``seconds`` in which this thread really ran.
        validation: steps done -> loss on the validation text.
        noise: steps done -> D²_sketch / D²_SGD.
    """

    contender: Contender
    memory: Memory
    model: ByteModel
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    own_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)

    def step(self, text: Tensor, rate: float) -> None:
        """Train on one batch and take the time."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        start, own_start = time.perf_counter(), time.thread_time()
        loss = next_byte_loss(self.model, text)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.own_seconds += time.thread_time() - own_start
        self.losses.append(loss.item())

    @torch.no_grad()
    def validate(self, batches: Sequence[Tensor]) -> None:
        """Take the mean loss on the validation text."""
        total = sum(next_byte_loss(self.model, text).item() for text in batches)
        self.validation[len(self.losses)] = total / len(batches)


@dataclass(slots=True)
class Race:
    """All lanes, in the order of the contenders."""

    scale: Scale
    lanes: list[Lane]

    @property
    def steps(self) -> int:
        """Return how many steps all have done."""
        return min(len(lane.losses) for lane in self.lanes)

    @property
    def exact(self) -> Lane:
        """Return what all others are compared with."""
        return next(lane for lane in self.lanes if lane.contender.key == EXACT)

    @property
    def own_share(self) -> float | None:
        """Return the share of the time in which steps really ran; on a busy machine other processes take the rest."""
        total = sum(sum(lane.seconds) for lane in self.lanes)
        return sum(lane.own_seconds for lane in self.lanes) / total if total else None

    def speed(self, lane: Lane) -> float | None:
        """Return how many steps ``lane`` makes in the time of an exact one: the median over pairs of neighbours."""
        pairs = list(zip(self.exact.seconds, lane.seconds, strict=False))
        timed = pairs[WARMUP:] or pairs
        return statistics.median(exact / own for exact, own in timed) if timed else None


def prepare(scale: Scale, text: Text, seed: int, watch: Callable[[str], None]) -> Race:
    """Make the contenders' models from the same weights and measure what a step of each keeps."""
    torch.manual_seed(seed)
    model = ByteModel(scale.size)
    batch = next(text.batches(scale.batch, scale.size.length, seed))
    watch("measuring what an exact step keeps")
    exact_profile = profile_exact(model, batch)
    lanes = []
    for contender in CONTENDERS:
        watch(f"measuring what a step keeps: {contender.name}")
        memory = measure_memory(contender, model, batch, exact_profile)
        own = copy.deepcopy(model)
        contender.convert(own, exact_profile)
        lanes.append(Lane(contender, memory, own, make_optimizer(own)))
    return Race(scale, lanes)


def train(race: Race, text: Text, seed: int, watch: Callable[[Race], None]) -> None:
    """Train all lanes. After an exception, ``race`` still holds the steps that were done."""
    scale = race.scale
    validation = text.validation_batches(scale.validation_batches, scale.batch, scale.size.length)
    for step, batch in enumerate(islice(text.batches(scale.batch, scale.size.length, seed), scale.steps)):
        for lane in _rotated(race.lanes, step):
            lane.step(batch, scale.rate_at(step))
        watch(race)
        if step + 1 in scale.look_steps():
            for lane in race.lanes:
                lane.validate(validation)
                if lane.contender.config is not None and step + 1 in scale.noise_steps():
                    lane.noise[step + 1] = measure_noise(lane.model, batch)


def _rotated(lanes: list[Lane], step: int) -> list[Lane]:
    """Return the lanes with a different one first at each step, so that none always has the same place."""
    start = step % len(lanes)
    return lanes[start:] + lanes[:start]

"""Measure whole training steps: what each way keeps for backward, the peak of its step, and its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from backsketch import peak_memory, saved_memory

from .contenders import CHECKPOINTING, EXACT, Contender
from .timing import best_times
from .whole_step_subjects import DTYPES, SUBJECTS, Training
from .whole_step_ways import ADAPTER_WAYS, FULL_WAYS, WHOLE

BLOCKS = 2  # of a model that is timed: every block takes the same time
ROUNDS = 5
DEEP_WAYS = (EXACT, CHECKPOINTING, WHOLE)

Entry = dict[str, Any]
Clock = Callable[[], float]


def timed(
    subject: str, dtype: str, *, quick: bool, rounds: int = ROUNDS, clock: Clock = time.perf_counter
) -> list[Entry]:
    """Measure bytes and time of every way, on a few blocks."""
    blocks = 1 if quick else BLOCKS
    torch.manual_seed(0)
    chosen = SUBJECTS[subject]
    training = chosen.training(blocks, DTYPES[dtype], quick)
    adapted = chosen.with_adapters(training, quick)
    ways = [*((way, training) for way in FULL_WAYS), *((way, adapted) for way in ADAPTER_WAYS)]
    entries = [_bytes(way, of) for way, of in ways]
    times = best_times(
        {way.name: of.step for way, of in ways},
        rounds=rounds,
        title=f"{subject}, {dtype}",
        prepare={way.name: partial(way.applied, of.model) for way, of in ways},
        clock=clock,
    )
    for entry in entries:
        entry["seconds"] = times[entry["name"]]
        entry["time"] = entry["seconds"] / times[EXACT.name]
    return entries


def deep(subject: str, dtype: str, *, quick: bool, ways: Sequence[Contender] = DEEP_WAYS) -> list[Entry]:
    """Measure the bytes of a model with all of its blocks."""
    torch.manual_seed(0)
    chosen = SUBJECTS[subject]
    training = chosen.training(3 if quick else chosen.blocks, DTYPES[dtype], quick)
    return [_bytes(way, training) for way in ways]


def _bytes(way: Contender, training: Training) -> Entry:
    """Return what a converted model keeps for backward and the peak of its step, with the optimizer's states."""
    model, optimizer = training.model, training.optimizer
    if not optimizer.state:
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()  # makes the states
        optimizer.zero_grad()
    with way.applied(model):
        with peak_memory(model, optimizer) as measured, saved_memory(model) as saved:
            loss = training.loss()
            kept = saved.activations
            loss.backward()
            del loss
            optimizer.step()
        peak = measured.peak
        optimizer.zero_grad()
    return {"name": way.name, "kept": kept, "peak": peak.total, "parts": peak.parts, "place": str(peak.place)}

"""Measure what a step keeps, its peak, and the noise that its sketches add, outside the timing."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ...memory.peak import peak_memory
from ...memory.profile_result import Profile
from ...memory.profiling import profile
from ...memory.recording import record_ledger
from ...monitor.noise_monitor import NoiseMonitor
from .contenders import Contender
from .model import ByteModel, next_byte_loss


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one step.

    Attributes:
        linear: what is kept for backward only because linear layers need their input: the inputs, or the sketches.
        kept: all that is kept for backward, without the model itself.
        peak: the most in memory at once: weights, gradients, the optimizer's states, and what is kept.
    """

    linear: int
    kept: int
    peak: int


def profile_exact(model: ByteModel, text: Tensor) -> Profile:
    """Profile a step of the exact model; the profile can evaluate every config."""
    inputs, targets = text[:, :-1], text[:, 1:].flatten()
    return profile(model, inputs, loss=lambda logits: torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets))


def measure_memory(contender: Contender, model: ByteModel, text: Tensor, exact_profile: Profile) -> Memory:
    """Measure one step of a copy of ``model``, after a first step has made the optimizer's states."""
    model = copy.deepcopy(model)
    contender.convert(model, exact_profile)
    optimizer = make_optimizer(model)
    next_byte_loss(model, text).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    with peak_memory(model, optimizer) as peak:
        before = peak.live
        loss = next_byte_loss(model, text)
        kept = peak.live - before - loss.nbytes
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return Memory(_linear_bytes(contender, model, text, exact_profile), kept, peak.total)


def measure_noise(model: ByteModel, text: Tensor) -> float:
    """Return the exact D²_sketch / D²_SGD for this batch, averaged over layers."""
    with NoiseMonitor(model, exact=True) as monitor:
        next_byte_loss(model, text).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    ratios = [float(record["ratio"]) for record in monitor.to_records()]
    return sum(ratios) / len(ratios)


def make_optimizer(model: ByteModel) -> torch.optim.AdamW:
    """Return the optimizer that all train with."""
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _linear_bytes(contender: Contender, model: ByteModel, text: Tensor, exact_profile: Profile) -> int:
    if contender.config is None:
        return record_ledger(model, lambda: next_byte_loss(model, text)).released(exact_profile.chosen)
    chosen = dict.fromkeys(exact_profile.chosen, contender.config)
    unpaid = exact_profile.unpaid(chosen)
    return exact_profile.ledger.sketches({name: config for name, config in chosen.items() if name not in unpaid})

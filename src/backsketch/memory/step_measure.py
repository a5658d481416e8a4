"""measure_step: what one training step of a model keeps for backward and needs at its peak, converted in any way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..convert.conversion import unsketch_
from ..rest.saving import observe_saving
from ..tensor_storages import model_tensors, sizes
from .family_profile import FamilyProfile, FamilyRecorder
from .live_storages import Peak
from .meta_device import meta_step
from .peak import peak_memory
from .saved import saved_memory
from .training_step import forward_to_loss, on_meta, to_device_of
from .untouched_model import untouched


@dataclass(frozen=True, slots=True)
class StepMeasure:
    """One step: the bytes kept for backward, the peak, and what each family of ``rest`` keeps."""

    kept: int
    peak: Peak
    families: tuple[FamilyProfile, ...]


def measure_step(model: nn.Module, batch: Mapping[str, Any], convert: Callable[[nn.Module], object]) -> StepMeasure:
    """Convert ``model``, run one step of forward and backward, and leave the model exactly as it was."""
    inputs = to_device_of(model, dict(batch))
    with untouched(model, inputs), meta_step() if on_meta(model) else nullcontext():
        convert(unsketch_(model))
        with peak_memory(model) as peak:
            loss, kept, families = measure_forward(model, lambda: forward_to_loss(model, (), inputs, None))
            loss.backward()  # type: ignore[no-untyped-call]
    return StepMeasure(kept, peak.peak, families)


def measure_forward(model: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, int, tuple[FamilyProfile, ...]]:
    """Run ``model`` forward, and return the loss, the bytes that are kept for backward, and by which families."""
    recorder = FamilyRecorder(frozenset(sizes(model_tensors(model))))
    with saved_memory(model) as saved, observe_saving(recorder):
        loss = forward()
    return loss, saved.activations, recorder.families()

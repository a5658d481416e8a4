"""Ways to run a training step, each measured: checkpointed, sketched, packed, with a fused loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..config import SketchConfig
from ..convert.checkpointed_blocks import blocks_of, checkpoint_
from ..convert.conversion import no_layer, sketch_
from ..losses.fused_models import can_fuse, fuse_loss_
from ..memory.family_profile import FamilyProfile
from ..memory.live_storages import Peak
from ..memory.profile_result import Profile
from ..memory.step_measure import measure_step
from ..torch_private import SHOWS_WHAT_IS_SAVED

_SAME = 1.01  # a peak within this factor of the lowest is as good


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWay:
    """A way to run a step, and what it needs.

    Attributes:
        sketched, rest, fused: what it changes, from which its Python code is made.
        offered: whether it may be recommended: checkpointing is an alternative that costs time.
        families: what each family of ``rest`` keeps, before and after.
    """

    name: str
    kept: int
    peak: Peak
    sketched: bool = False
    rest: bool = False
    fused: bool = False
    offered: bool = True
    families: tuple[FamilyProfile, ...] = ()


def measured_ways(network: nn.Module, batch: Mapping[str, Any], found: Profile) -> Iterator[StepWay | str]:
    """Yield the ways, exact first, or why one could not be measured; ``found`` is the profile of the sketch to use."""
    yield StepWay(name="exact", kept=found.kept_before, peak=found.peak_before, offered=False)
    if blocks := blocks_of(network):
        yield _measured(network, batch, lambda model: checkpoint_(model, blocks), name="checkpointing", offered=False)
    has_head = can_fuse(network)
    if has_head and blocks:
        both = "checkpointing and fused loss"
        yield _measured(network, batch, lambda model: checkpoint_(fuse_loss_(model), blocks), name=both, offered=False)
    if has_head:
        yield _measured(network, batch, fuse_loss_, name="fused loss", fused=True)
    if found.pays:
        yield StepWay(name="linear sketches", kept=found.kept_after, peak=found.peak_after, sketched=True)
    if not SHOWS_WHAT_IS_SAVED:
        return
    for fused in (False, True)[: 1 + has_head]:
        parts = ["sketches"] * bool(found.pays) + ["rest"] + ["fused loss"] * fused
        name = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
        changes = {"sketched": bool(found.pays), "rest": True, "fused": fused}
        yield _measured(network, batch, _whole(found, fused), name=name, **changes)


def _measured(
    network: nn.Module, batch: Mapping[str, Any], convert: Callable[[nn.Module], object], *, name: str, **changes: bool
) -> StepWay | str:
    try:
        step = measure_step(network, batch, convert)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = str(error).split("\n", 1)[0][:200]
        return f"{name} could not be measured: {reason}"
    return StepWay(name=name, kept=step.kept, peak=step.peak, families=step.families, **changes)


def best_way(ways: tuple[StepWay, ...]) -> StepWay | None:
    """Return the way with the lowest peak, or one that changes less and is as good; None if none lowers the peak."""
    offered = [way for way in ways if way.offered]
    if not offered:
        return None
    lowest = min(way.peak.total for way in offered)
    best = next(way for way in offered if way.peak.total <= _SAME * lowest)
    return best if best.peak.total <= 0.99 * ways[0].peak.total else None


def _whole(found: Profile, fused: bool) -> Callable[[nn.Module], object]:
    """Return what sketches the layers that pay, packs the rest, and fuses the loss if asked."""
    configs: dict[Any, SketchConfig] = {re.compile(re.escape(name)): found.chosen[name] for name in found.pays}

    def convert(model: nn.Module) -> object:
        if fused:
            fuse_loss_(model)
        return sketch_(model, configs or None, None if configs else no_layer, rest=True)

    return convert

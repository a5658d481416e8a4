"""StepOptions: measures what may be chosen for a whole step of a model, with bytes and noise."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn

from ..changed_forward import why_not_changeable
from ..config import STORED_BITS, SketchConfig
from ..convert.checkpointed_blocks import blocks_of
from ..convert.conversion import unsketch_
from ..masks.attention_mask import follow_attention_mask
from ..memory.ledger import Ledger
from ..memory.meta_device import meta_step
from ..memory.recording import record_ledger
from ..memory.training_step import forward_to_loss, to_device_of
from ..memory.untouched_model import untouched
from ..rest.packing_modules import can_pack
from ..rest.rest_config import RestConfig
from ..torch_private import SHOWS_WHAT_IS_SAVED
from .family_noise import BITS, PRECISE, family_noise, with_bits
from .layer_noise import Storage, added_noise
from .layer_points import layer_points
from .model_setting import ModelSetting
from .step_choices import EXACT, Family, LinearPart, StepChoices
from .step_meter import StepMeter

_UNPACKED = RestConfig(pointwise=None, product=None, attention=None, norm=None, other=None)  # only masks are packed


@dataclass(frozen=True, eq=False)
class StepOptions:
    """Layers that share an input, families of operations and blocks of a model, as one batch shows them.

    Everything is measured when it is first asked for.

    Attributes:
        convertible: the layers that may be sketched; base: the config whose ratio and bits are chosen.
        storages: the bits to choose from.
    """

    meter: StepMeter
    convertible: Mapping[str, SketchConfig]
    base: SketchConfig
    storages: Sequence[Storage]

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Name the blocks that may be checkpointed, in the order in which they run.

        The first ones are the first to be checkpointed: backward runs them again when the others have let go.
        """
        modules = dict(self.meter.model.named_modules())
        return tuple(name for name in blocks_of(self.meter.model) if why_not_changeable(modules[name]) is None)

    def modules_outside(self, blocks: Collection[str]) -> list[str]:
        """Name the modules that can keep everything else in bits of their own, outside of ``blocks``."""
        inside = tuple(f"{name}." for name in blocks)
        named = self.meter.model.named_modules()
        return [name for name, module in named if name and can_pack(module) and not f"{name}.".startswith(inside)]

    @cached_property
    def ledger(self) -> Ledger:
        """Return who keeps what for backward in the exact model; of one that does not fit, on the meta device."""
        meter = self.meter
        try:
            with untouched(meter.model, (meter.args, meter.kwargs)):
                follow_attention_mask(unsketch_(meter.model))
                return record_ledger(meter.model, meter.forward)
        except torch.OutOfMemoryError:
            twin = meta_twin(meter.model)
            args, kwargs = to_device_of(twin, (meter.args, meter.kwargs))
            with meta_step():
                return record_ledger(unsketch_(twin).train(), lambda: forward_to_loss(twin, args, kwargs, meter.loss))

    @property
    def kept_before(self) -> int:
        """Return the bytes that the exact model keeps for backward."""
        return self.ledger.kept

    @cached_property
    def parts(self) -> tuple[LinearPart, ...]:
        """List the sets of layers that share an input which nobody else keeps."""
        ledger, meter = self.ledger, self.meter
        named = [
            tuple(part) for part in ledger.parts(self.convertible) if ledger.released(part) > ledger.sketches(part)
        ]
        every = tuple(dict.fromkeys([*self.storages, (None, False), *((bits, True) for bits in STORED_BITS)]))
        precise = PRECISE if SHOWS_WHAT_IS_SAVED else None
        with untouched(meter.model, (meter.args, meter.kwargs)):
            ModelSetting(dict.fromkeys(chain(*named), EXACT), precise).put_on(meter.model)
            noise = added_noise(meter.model, list(chain(*named)), self.base, meter.forward, every)
        return tuple(
            LinearPart(part, list(layer_points(meter.model, part, ledger, self.base, self.storages, noise)), noise)
            for part in named
        )

    @cached_property
    def exact_layers(self) -> dict[str, SketchConfig]:
        """Return the config that leaves the inputs of all parts as they are, whatever is packed."""
        return {name: EXACT for part in self.parts for name in part.layers}

    @cached_property
    def measured_families(self) -> tuple[tuple[Family, ...], float]:
        """List the families that keep anything, and return the squared norm of the gradient."""
        if not SHOWS_WHAT_IS_SAVED:
            return (), 0.0
        sizes: dict[str, dict[int | None, int]] = {}
        for family, choices in BITS.items():
            found: dict[int | None, float] = {
                bits: self.meter.kept(ModelSetting(self.exact_layers, with_bits(family, bits)))
                for bits in (None, *choices)
            }
            least = min(found.values())
            if found[None] > least:
                sizes[family] = {bits: int(min(size, found[None]) - least) for bits, size in found.items()}
        noise, gradient = family_noise(self.meter, sizes, self.exact_layers)
        return tuple(Family(family, sizes[family], noise[family]) for family in sizes), gradient

    @cached_property
    def masks_pay(self) -> bool:
        """Tell whether packing only masks lowers what is kept."""
        return SHOWS_WHAT_IS_SAVED and self.meter.kept(ModelSetting(rest=_UNPACKED)) < self.meter.kept(ModelSetting())

    def with_blocks(self, count: int, checkpoint: int | None = None) -> StepChoices:
        """Return what may be chosen while the first ``count`` blocks are checkpointed, their inputs in so many bits."""
        blocks = self.blocks[:count]
        inside = tuple(f"{name}." for name in blocks)
        parts = tuple(part for part in self.parts if not any(name.startswith(inside) for name in part.layers))
        families, _ = self.measured_families
        return StepChoices(parts, families, self.masks_pay, blocks, self._share(count), checkpoint)

    def _share(self, count: int) -> float:
        """Return which share of what is kept in few bits is outside of the first ``count`` blocks."""
        if not count:
            return 1.0
        settings = (ModelSetting(self.exact_layers, PRECISE, self.blocks[:each]) for each in (0, count))
        whole, rest = (self.meter.kept(setting) for setting in settings)
        return min(1.0, rest / whole) if whole < math.inf else 1.0


def meta_twin(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` on the meta device, without a copy of its weights on the way."""
    own: list[Tensor] = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): _on_meta(tensor) for tensor in own})


def _on_meta(tensor: Tensor) -> Tensor:
    twin = tensor.detach().to("meta")
    return nn.Parameter(twin, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin

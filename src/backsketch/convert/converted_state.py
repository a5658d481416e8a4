"""ConvertedState: what sketch_ has made of a model, to be restored after something else has converted it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ..config import SketchConfig, check_config
from ..linear.algorithm import EXACT_IN_CHECKPOINT
from ..losses.fused_models import FusedLoss, fuse_again, fused_losses
from ..masks.attention_mask import follow_attention_mask
from ..rest.packing_modules import OwnRest, present_rests, switch_on_again
from ..rest.rest_config import RestConfig
from .checkpointed_blocks import checkpoint_, present_blocks
from .conversion import convert_layer, unsketch_
from .layer_classes import exact_type


@dataclass(frozen=True, slots=True)
class ConvertedState:
    """The configs of sketched layers and of modules that keep everything else in few bits, by name.

    ``checkpointed`` tells whether layers are sketched inside activation checkpointing too, ``blocks`` names those that
    ``checkpoint_`` has changed, and ``fused`` the modules whose loss is fused.
    """

    configs: dict[str, SketchConfig]
    rests: dict[str, RestConfig | OwnRest]
    checkpointed: bool
    blocks: tuple[str, ...] = ()
    fused: Mapping[str, FusedLoss] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> ConvertedState:
        """Read the state of ``model``."""
        checkpointed = not any(module.__dict__.get(EXACT_IN_CHECKPOINT) for module in model.modules())
        blocks, fused = present_blocks(model), fused_losses(model)
        return cls(present_configs(model), present_rests(model), checkpointed, blocks, fused)

    def restore(self, model: nn.Module) -> None:
        """Give every module of ``model`` the class and the config that it had, and no other module any."""
        unsketch_(model)
        fuse_again(model, self.fused)
        for name, config in self.configs.items():
            convert_layer(model.get_submodule(name), config, self.checkpointed)
        switch_on_again(model, self.rests)
        checkpoint_(model, self.blocks)
        if self.configs:
            follow_attention_mask(model)


def present_configs(model: nn.Module) -> dict[str, SketchConfig]:
    """Return name -> config for the layers that ``sketch_`` has converted."""
    sketched = {name: module for name, module in model.named_modules() if exact_type(module) is not None}
    return {name: check_config(module.config) for name, module in sketched.items()}

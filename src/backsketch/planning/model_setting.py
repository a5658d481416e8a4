"""ModelSetting: all that a plan of a whole step chooses, and how a model takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ..config import SketchConfig
from ..convert.checkpointed_blocks import checkpoint_
from ..convert.conversion import convert_layer, unsketch_
from ..masks.attention_mask import follow_attention_mask
from ..rest.packing_modules import set_apart, switch_on
from ..rest.rest_config import RestConfig


@dataclass(frozen=True, slots=True)
class ModelSetting:
    """Configs of linear layers by name, bits of everything else, and the blocks that are checkpointed.

    ``module_rests`` are for modules that keep everything else in other bits than ``rest``, outer ones first.
    """

    configs: Mapping[str, SketchConfig] = field(default_factory=dict)
    rest: RestConfig | None = None
    blocks: tuple[str, ...] = ()
    module_rests: Mapping[str, RestConfig] = field(default_factory=dict)

    def put_on(self, model: nn.Module) -> None:
        """Convert ``model`` from whatever it is; layers inside checkpointed blocks stay exact."""
        unsketch_(model)
        for name, config in self.configs.items():
            convert_layer(model.get_submodule(name), config, checkpointed=False)
        if self.rest is not None:
            switch_on(model, self.rest)
        for name, rest in self.module_rests.items():
            set_apart(model.get_submodule(name), rest)
        checkpoint_(model, self.blocks)
        if self.configs:
            follow_attention_mask(model)

"""ModelSetting: all that a plan of a whole step chooses, and how a model takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ..config import SketchConfig
from ..convert.checkpointed_blocks import checkpoint_
from ..convert.conversion import convert_layer, unsketch_
from ..masks.attention_mask import follow_attention_mask
from ..rest.packing_modules import switch_on
from ..rest.rest_config import RestConfig


@dataclass(frozen=True, slots=True)
class ModelSetting:
    """Configs of linear layers by name, bits of everything else, and the blocks that are checkpointed."""

    configs: Mapping[str, SketchConfig] = field(default_factory=dict)
    rest: RestConfig | None = None
    blocks: tuple[str, ...] = ()

    def put_on(self, model: nn.Module) -> None:
        """Convert ``model`` from whatever it is; layers inside checkpointed blocks stay exact."""
        unsketch_(model)
        for name, config in self.configs.items():
            convert_layer(model.get_submodule(name), config, checkpointed=False)
        if self.rest is not None:
            switch_on(model, self.rest)
        checkpoint_(model, self.blocks)
        if self.configs:
            follow_attention_mask(model)

"""EffectiveInput: an input as it is sketched, with padded rows left out or zero and the mean row subtracted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import SketchConfig
from ..sketches import SKETCHES


@dataclass(frozen=True, slots=True)
class EffectiveInput:
    """x as it is sketched, a config for its number of rows, the mean subtracted, and which rows of X it has."""

    x: Tensor
    config: SketchConfig
    mean: Tensor | None
    chosen: Tensor | None

    @classmethod
    def of(cls, x: Tensor, config: SketchConfig, valid: Tensor | None = None) -> EffectiveInput:
        """Prepare x, (rows, features): ``rows`` draws among valid rows only, other kinds set padded rows to zero."""
        if config.keeps_input(len(x)) or not len(x):
            return cls(x, config, None, None)
        dim = config.dim_for(len(x))
        if valid is not None and SKETCHES[config.kind].leaves_out_padding and dim < len(x):
            config = replace(config, ratio=None, dim=dim, min_dim=1, max_dim=None)
            return replace(cls.of(x[valid], config), chosen=valid)
        mean = None
        if config.center:
            mean = x.mean(0) if valid is None else x[valid].sum(0) / valid.sum().clamp(min=1)
            x = x - mean
        if valid is not None:
            x = torch.where(valid.unsqueeze(1), x, 0)
        return cls(x, config, mean, None)

    def of_gradient(self, y: Tensor) -> Tensor:
        """Return the rows of Y that belong to ``x``."""
        return y if self.chosen is None else y[self.chosen]

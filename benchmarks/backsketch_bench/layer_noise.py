"""The noise that settings add in one layer, with what is the same for many of them computed once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from backsketch import noise
from backsketch.noise.moments import added_variance
from backsketch.noise.rounding import rounding_variance
from backsketch.noise.row_blocks import row_blocks_of
from backsketch.numerics import as_rows

from .activations import Activation
from .frontier_choices import Choice


@dataclass(frozen=True, slots=True, eq=False)
class LayerNoise:
    """One layer in fp64, with ‖X‖²‖Y‖², Σ_i ‖x_i‖²‖y_i‖² and ‖XᵀY‖² of all its rows in ``moments``, (4, 1).

    Rows that are not ``valid`` must have y_i = 0.
    """

    name: str
    x: Tensor
    y: Tensor
    valid: Tensor
    moments: Tensor
    _rounding: dict[tuple[int, bool], float] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: Activation) -> LayerNoise:
        """Prepare a layer that sees every token."""
        if layer.valid is None:
            raise ValueError(f"a layer must see every token to be measured, {layer.name} does not")
        x, y = as_rows(layer.x).double(), as_rows(layer.y).double()
        x_norms, y_norms = x.square().sum(1), y.square().sum(1)
        product = (x.t() @ y).square().sum()
        moments = torch.stack((x_norms.sum() * y_norms.sum(), x_norms @ y_norms, product, product.new_zeros(())))
        return cls(layer.name, x, y, layer.valid.reshape(-1), moments.unsqueeze(1))

    @property
    def sgd(self) -> float:
        """Return D²_SGD, the noise that the batch has anyway."""
        return self._sgd_of(len(self.x))

    def relative(self, choice: Choice) -> float:
        """Return D² / D²_SGD of a setting."""
        config = choice.config
        if config.kind == "rows" and not config.center:
            return self._of_rows(choice) / self.sgd
        blocks = row_blocks_of(config, len(self.x))
        plain = config.bits is None and not config.center and not choice.masked
        if plain and blocks.count == 1 and not blocks.mirrors:
            return float(added_variance(blocks, self.moments)) / self.sgd
        valid = self.valid if choice.masked else None
        return float(noise.sketch_variance(self.x, self.y, config, valid)) / self.sgd

    def rounding(self, bits: int, rotate: bool) -> float:
        """Return the D² of rounding when all rows are kept: Σ_i ‖y_i‖² v_i."""
        if (bits, rotate) not in self._rounding:
            variances = rounding_variance(self.x, bits, rotate)
            self._rounding[bits, rotate] = float((self.y.square().sum(1) * variances).sum())
        return self._rounding[bits, rotate]

    def _of_rows(self, choice: Choice) -> float:
        """Return (B/k − 1) D²_SGD + B/k Σ_i ‖y_i‖² v_i, with the V valid rows in place of B where masked."""
        config = choice.config
        count = int(self.valid.sum()) if choice.masked else len(self.x)
        weight = count / min(count, config.dim_for(len(self.x)))
        rounding = 0.0 if config.bits is None else self.rounding(config.bits, config.rotate)
        return (weight - 1) * self._sgd_of(count) + weight * rounding

    def _sgd_of(self, count: int) -> float:
        """Return (B·C − g) / (B − 1) for so many rows B: those left out have y_i = 0 and are in neither C nor g."""
        _, coincidence, product, _ = self.moments.flatten().tolist()
        return (count * coincidence - product) / (count - 1)

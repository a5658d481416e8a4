"""StepMeter: what a training step of a model keeps for backward, and its peak, under any setting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..memory.optimizer_states import states_of_all
from ..memory.peak import peak_memory
from ..memory.saved import saved_memory
from ..memory.training_step import backward, forward_to_loss
from ..memory.untouched_model import untouched
from .model_setting import ModelSetting

KEPT, PEAK = TOTALS = ("kept", "peak")


@dataclass(frozen=True, eq=False)
class StepMeter:
    """Measures on the model itself, where it is: another device has other kernels, which keep and use other bytes.

    A setting that runs out of memory has infinitely many bytes.

    Attributes:
        total: what to measure, of everything: what is kept for backward, or the peak.
        optimizer: whose states count in the peak. They are there from the second step on. The moment of its step needs
            weights, gradients and states, which the end of backward has too.
    """

    model: nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]
    loss: Callable[..., Tensor] | None
    total: str
    optimizer: str | None = None
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def __call__(self, setting: ModelSetting) -> float:
        """Return the total under ``setting``."""
        return self.kept(setting) if self.total == KEPT else self.peak(setting)

    def kept(self, setting: ModelSetting) -> float:
        """Return the bytes kept for backward of one forward pass."""
        return self._once(KEPT, setting, self._kept)

    def peak(self, setting: ModelSetting) -> float:
        """Return the most bytes at any time of a step, with the states of the optimiser."""
        return self._once(PEAK, setting, self._peak)

    def forward(self) -> Tensor:
        """Run the model to its loss."""
        return forward_to_loss(self.model, self.args, self.kwargs, self.loss)

    @property
    def states(self) -> int:
        """Return the bytes of the optimiser's states."""
        return 0 if self.optimizer is None else states_of_all(self.optimizer, self.model.parameters())

    def _once(self, total: str, setting: ModelSetting, measured: Callable[[], float]) -> float:
        key = total, tuple(setting.configs.items()), setting.rest, setting.blocks, tuple(setting.module_rests.items())
        if key not in self._known:
            try:
                with untouched(self.model, (self.args, self.kwargs)):
                    setting.put_on(self.model)
                    self._known[key] = measured()
            except torch.OutOfMemoryError:
                self._known[key] = math.inf
        return self._known[key]

    def _kept(self) -> float:
        with saved_memory(self.model) as saved:
            loss = self.forward()
        kept = saved.activations
        del loss
        return kept

    def _peak(self) -> float:
        with peak_memory(self.model) as peak:
            backward(self.forward())
        return peak.total + self.states

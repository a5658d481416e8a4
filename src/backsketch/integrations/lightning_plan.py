"""plan_fit: plan a fit of Lightning on its first batch, with the module's own training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .run_plan import first_batch, plan_run
from .run_settings import RunSettings


def plan_fit(
    settings: RunSettings,
    trainer: Trainer,
    module: LightningModule,
    optimizers: list[Optimizer],
    autocast: torch.dtype | None,
) -> dict[str, Any]:
    """Return what ``settings`` plan for the module, as plain values, with names of the module's own layers."""
    name = "budget" if settings.peak is None else "peak"
    if not module.automatic_optimization:
        raise ValueError(f"{name} must be None for a module that optimizes by hand: its step is not one backward pass")
    dataloader = trainer.train_dataloader
    if not isinstance(dataloader, DataLoader) or dataloader.batch_size is None:
        raise ValueError(f"{name} needs one DataLoader with a batch_size to plan on, got {dataloader!r}")
    batch = first_batch(dataloader, dataloader.batch_size, module.device)
    with _not_logging(module):
        return plan_run(settings, _TrainingStep(module), (batch,), {}, optimizers, autocast, part=_TrainingStep.PART)


class _TrainingStep(nn.Module):
    """A model whose forward is the training step of a LightningModule, which is its only part."""

    PART = "module"

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        vars(self)["forward"] = self.forward  # as if replaced: what runs in no forward of the module is not packed

    def forward(self, batch: Any) -> Any:
        return self.module.training_step(batch, 0)


@contextmanager
def _not_logging(module: LightningModule) -> Iterator[None]:
    """Let the module log nothing: what is measured is no step of the fit."""
    silent = {name: lambda *args, **kwargs: None for name in ("log", "log_dict")}
    before = {name: value for name, value in vars(module).items() if name in silent}
    vars(module).update(silent)
    try:
        yield
    finally:
        for name in silent:
            del vars(module)[name]
        vars(module).update(before)

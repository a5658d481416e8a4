"""What a run plans on its first batch, as a checkpoint keeps it, and the configs that this means."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from ..config import SketchConfig
from ..convert.conversion import Configs
from ..convert.converted_state import ConvertedState
from ..losses.fused_models import fuse_loss_
from ..memory.optimizer_states import OPTIMIZERS
from ..planning.plan_result import PlannedConfigs
from ..planning.planner import plan
from ..planning.total_plan import TotalPlan
from ..torch_private import tree_map_only
from .run_settings import RunSettings


def plan_run(
    settings: RunSettings,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    optimizers: list[Optimizer],
    autocast: torch.dtype | None,
    part: str = "",
) -> dict[str, Any]:
    """Plan for the budget or the peak of ``settings`` with one batch, and return it as plain values.

    The plan is for the loss that will run: fused, if it is to be. ``part`` names the part of ``model`` that is trained,
    if that is not all of it: names are then those inside.
    """
    if settings.fused_loss:
        trained = model.get_submodule(part)
        before = ConvertedState.of(trained)
        fuse_loss_(trained)
        try:
            return plan_run(replace(settings, fused_loss=False), model, args, kwargs, optimizers, autocast, part)
        finally:
            before.restore(trained)
    config = settings.config if isinstance(settings.config, SketchConfig) else None
    asked = settings.where

    def inside(name: str) -> str:
        return name.removeprefix(f"{part}.")

    where = None if asked is None else lambda name, layer: asked(inside(name), layer)
    if settings.peak is None:
        assert settings.budget is not None
        planned = plan(model, *args, budget=settings.budget, config=config, where=where, **kwargs)
        return {inside(name): None if chosen is None else asdict(chosen) for name, chosen in planned.items()}
    counted = settings.optimizer or name_of(optimizers)
    device = next(model.parameters()).device
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        options: dict[str, Any] = {"optimizer": counted, "config": config, "where": where, **kwargs}
        total: TotalPlan = plan(model, *args, peak=settings.peak, **options)
    return total.inside(part).to_json()


def configs_of(settings: RunSettings, planned: Mapping[str, Any] | None) -> Configs | None:
    """Return what ``plan_run`` planned, as ``sketch_`` takes it; without a plan, the config of ``settings``."""
    if planned is None:
        return settings.config
    if settings.peak is not None:
        return TotalPlan.from_json(planned)
    return PlannedConfigs(
        {name: None if fields is None else SketchConfig(**fields) for name, fields in planned.items()}
    )


def name_of(optimizers: list[Optimizer]) -> str:
    """Return the name under which ``plan`` knows the optimisers of a run."""
    names = {name for each in optimizers if (name := _name(each)) is not None}
    if len(names) == 1 and all(_name(each) for each in optimizers):
        return names.pop()
    kinds = " and ".join(dict.fromkeys(type(each).__name__ for each in optimizers)) or "no optimizer"
    known = ", ".join(OPTIMIZERS)
    raise ValueError(f"optimizer must be given where peak is, one of {known}: the states of {kinds} are not known")


def _name(optimizer: Optimizer) -> str | None:
    if isinstance(optimizer, (torch.optim.AdamW, torch.optim.Adam)):
        return "adamw"
    if isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups):
        return "sgd"
    if "bitsandbytes" in sys.modules:
        from bitsandbytes.optim import AdamW8bit

        if isinstance(optimizer, AdamW8bit):
            return "adamw8bit"
    return None


def first_batch(dataloader: DataLoader[Any], size: int, device: torch.device) -> Any:
    """Return the first ``size`` samples as a batch, without a step of the sampler or of a random generator."""
    dataset: Any = dataloader.dataset
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__"):  # which need not end by itself
        dataset = map(dataset.__getitem__, range(len(dataset)))
    with torch.random.fork_rng(devices=[]):
        batch = dataloader.collate_fn(list(itertools.islice(dataset, size)))
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)

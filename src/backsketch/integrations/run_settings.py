"""RunSettings: what a callback is told of a training run, checked once, and the session that it makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..argument_checks import check_flag
from ..config import SketchConfig
from ..control.noise_limit import check_limit
from ..convert.conversion import Configs, Where, check_choice
from ..memory.optimizer_states import check_optimizer
from ..planning.budget import as_budget
from ..rest.packing_modules import check_rest
from ..rest.rest_config import Rest
from .session import Session


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The arguments that the callbacks of all trainers have; see those for what each means."""

    config: Configs | None
    budget: str | float | int | None
    peak: str | float | int | None
    optimizer: str | None
    noise_every: int | None
    noise_by_layer: bool
    noise_schedule: bool
    noise_limit: float | None
    where: Where | None
    checkpointed: bool
    rest: Rest
    fused_loss: bool

    def __post_init__(self) -> None:
        if self.budget is not None and self.peak is not None:
            raise ValueError(f"give budget or peak, not both: got budget={self.budget!r} and peak={self.peak!r}")
        for name in ("budget", "peak"):
            if (limit := getattr(self, name)) is not None:
                if not (self.config is None or isinstance(self.config, SketchConfig)):
                    raise ValueError(f"config must be None or one SketchConfig where {name} plans, got {self.config!r}")
                as_budget(limit, name)
        if self.peak is not None and self.rest is not None:
            raise ValueError(f"rest must be None where peak is given, since the plan chooses it, got {self.rest!r}")
        if self.optimizer is not None:
            check_optimizer(self.optimizer)
        check_choice(self.config, self.where)
        check_rest(self.rest)
        for name in ("checkpointed", "fused_loss", "noise_by_layer", "noise_schedule"):
            check_flag(name, getattr(self, name))
        every = self.noise_every
        if every is not None and not (isinstance(every, int) and not isinstance(every, bool) and every > 0):
            raise ValueError(f"noise_every must be a positive integer or None, got {every!r}")
        if self.noise_limit is not None:
            check_limit(self.noise_limit, "noise_limit")
        if self.noise_by_layer and every is None and not self.controlled:
            raise ValueError("noise_by_layer=True reports what noise_every measures: give noise_every too, got None")

    @property
    def planned(self) -> bool:
        """Tell whether a plan chooses the configs."""
        return self.budget is not None or self.peak is not None

    @property
    def controlled(self) -> bool:
        """Tell whether the noise controls anything."""
        return self.noise_schedule or self.noise_limit is not None

    def session(
        self, model: nn.Module, configs: Configs | None, *, step: int = 0, autocast: torch.dtype | None = None
    ) -> Session:
        """Return the session of a run with ``configs``, which has begun after ``step`` steps."""
        session = Session(
            model,
            self.noise_every,
            noise_by_layer=self.noise_by_layer,
            noise_schedule=self.noise_schedule,
            noise_limit=self.noise_limit,
        )
        try:
            session.begin(
                configs,
                self.where,
                step,
                checkpointed=self.checkpointed,
                rest=self.rest,
                fused_loss=self.fused_loss,
                autocast=autocast,
            )
        except BaseException:
            session.end()
            raise
        return session

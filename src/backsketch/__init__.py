"""Backsketch: train from sketches of linear inputs, and keep everything else that backward needs in few bits."""

from __future__ import annotations

from . import noise
from .config import SketchConfig
from .control.limit_change import LimitChange
from .control.noise_limit import NoiseLimit
from .control.noise_schedule import NoiseSchedule
from .convert.checkpointed_blocks import blocks_of, checkpoint_, uncheckpoint_
from .convert.conversion import sketch_, unsketch_
from .convert.conversion_summary import summary
from .fitting.fit_result import Fit
from .fitting.fitter import fit
from .linear.algorithm import sketched_linear
from .linear.layer import SketchedLinear
from .losses.fused_models import fuse_loss_, unfuse_loss_
from .losses.linear_cross_entropy import linear_cross_entropy
from .masks.attention_mask import ignore_attention_mask
from .masks.scopes import valid_rows
from .memory.layer_cost import cost
from .memory.peak import peak_memory
from .memory.profile_result import Profile
from .memory.profiling import profile
from .memory.saved import saved_memory
from .monitor.noise_monitor import NoiseMonitor
from .planning.plan_result import Plan, PlanError
from .planning.planner import plan
from .planning.total_plan import TotalPlan
from .rest.rest_config import RestConfig
from .sketches import SKETCHES

__version__ = "0.2.0.dev0"

__all__ = [
    "SKETCHES",
    "Fit",
    "LimitChange",
    "NoiseLimit",
    "NoiseMonitor",
    "NoiseSchedule",
    "Plan",
    "PlanError",
    "Profile",
    "RestConfig",
    "SketchConfig",
    "SketchedLinear",
    "TotalPlan",
    "blocks_of",
    "checkpoint_",
    "cost",
    "fit",
    "fuse_loss_",
    "ignore_attention_mask",
    "linear_cross_entropy",
    "noise",
    "peak_memory",
    "plan",
    "profile",
    "saved_memory",
    "sketch_",
    "sketched_linear",
    "summary",
    "uncheckpoint_",
    "unfuse_loss_",
    "unsketch_",
    "valid_rows",
]

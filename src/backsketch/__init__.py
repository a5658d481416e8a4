"""Backsketch: train linear layers from a sketch of their input, and keep a tenth of its fp32 bytes for backward."""

from __future__ import annotations

from . import noise
from .attention_mask import ignore_attention_mask
from .autograd import sketched_linear
from .config import SketchConfig
from .conversion import sketch_, unsketch_
from .cost import cost
from .layer import SketchedLinear
from .memory import saved_memory
from .monitor import NoiseMonitor
from .padding import valid_rows
from .peak import peak_memory
from .plan import plan
from .profile import profile
from .sketches import SKETCHES
from .summary import summary

__version__ = "0.2.0.dev0"

__all__ = [
    "SKETCHES",
    "NoiseMonitor",
    "SketchConfig",
    "SketchedLinear",
    "cost",
    "ignore_attention_mask",
    "noise",
    "peak_memory",
    "plan",
    "profile",
    "saved_memory",
    "sketch_",
    "sketched_linear",
    "summary",
    "unsketch_",
    "valid_rows",
]

"""Backsketch: train linear layers from a sketch of their input, and keep a tenth of it for backward."""

from __future__ import annotations

from . import noise
from .autograd import sketched_linear
from .config import SketchConfig
from .conversion import sketch_, unsketch_
from .layer import SketchedLinear
from .monitor import NoiseMonitor
from .padding import valid_rows
from .sketches import SKETCHES
from .summary import summary

__version__ = "0.1.0"

__all__ = [
    "SKETCHES",
    "NoiseMonitor",
    "SketchConfig",
    "SketchedLinear",
    "noise",
    "sketch_",
    "sketched_linear",
    "summary",
    "unsketch_",
    "valid_rows",
]

"""NamedModel: the model that a user names on the command line, built from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..fitting.positions import positions
from .models import build, find_head, load_config, stated_dtype, takes_seq
from .options import DTYPES


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model with random weights, or with shapes alone on the meta device.

    Attributes:
        config: that of transformers.
        head: what it is trained for.
        dtype: the name of the type of its weights; dtype_from: ``--dtype``, the model's ``config`` or ``default``.
        network: the model.
        has_seq: whether its examples may have any length.
    """

    config: Any
    head: str
    dtype: str
    dtype_from: str
    network: nn.Module
    has_seq: bool

    @classmethod
    def of(cls, name: str, *, head: str | None, dtype: str | None, seq: int, device: str) -> NamedModel:
        """Return the model, or raise ValueError if it has no such head, dtype or length."""
        config = load_config(name)
        head = find_head(config) if head is None else head
        stated = stated_dtype(config) if dtype is None else None
        used = dtype or stated or "float32"
        if used not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {used!r} from the config: give --dtype")
        network = build(config, head, device=device, dtype=DTYPES[used])
        has_seq = takes_seq(config, head)
        most = positions(network) if has_seq else None
        if most is not None and seq > most:
            raise ValueError(f"seq must be at most {most}, the positions that the model has, got {seq}")
        return cls(config, head, used, "--dtype" if dtype else "config" if stated else "default", network, has_seq)

"""Opaque operators: a sketch as one step for torch.compile, selective checkpointing and fake tensors.

Drawing the seed, sketching, and returning both is one operator, so that no pass of the compiler can redo one without
the other: rows and seed always come from the same draw, and backward never meets rows of another S. (Random numbers
drawn by traced code may be drawn again in backward; E[∂W] is then near 0.) The compiler may treat equal calls as one,
which is the compiled form of sharing: q, k and v read one tensor and keep one sketch of it.

A config crosses into a graph as one string. Of its numbers the compiler would make inputs of the graph where layers
differ in them, and they are not: what is kept has another shape for each.

Selective checkpointing caches the results of chosen operations in the order of its first pass. Whether a layer finds
what another one kept depends on who holds it, which differs between the passes. As one operator a layer runs the same
operations in both, and chosen operations inside of it are not seen.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..config import SketchConfig
from ..masks.scopes import masked_rows
from ..numerics import as_rows, compute_dtype
from ..seeds import draw_seed
from ..storage.packing import group_count, packed_bytes
from .checkpointing import inside_checkpoint
from .keep_or_share import keep_or_share
from .keeping import keep
from .sharing import Kept
from .weight_gradient import weight_gradient

# A generator made and seeded in the middle of a captured CUDA graph would be frozen into it.
_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


def traced_keep(x: Tensor, as_json: str) -> tuple[Tensor, ...]:
    """Draw a seed and return what to keep of x, the seed first: x (rows, in_features) -> tensors."""
    return tuple(_keep(x, as_json))


def traced_weight_gradient(
    kept: tuple[Tensor, ...], y: Tensor, as_json: str, in_features: int, valid: Tensor | None = None
) -> Tensor:
    """Return the unbiased estimate of Yᵀ X: kept, y (rows, out_features) -> (out_features, in_features)."""
    out: Tensor = _weight_gradient(list(kept), y, in_features, valid, as_json)
    return out


def opaque_keep(source: Tensor, x: Tensor, seed: Tensor, reader: int, as_json: str) -> tuple[Tensor | None, Kept]:
    """Do what ``keep_or_share`` does, as one operator; x (..., in_features)."""
    valid, *kept = torch.ops.backsketch.keep_or_share(source, x, seed, reader, as_json)
    return (valid if valid.numel() else None), tuple(kept)


@torch.library.custom_op("backsketch::keep", mutates_args=(), schema="(Tensor x, str config) -> Tensor[]", **_TAGS)
def _keep(x: Tensor, as_json: str) -> list[Tensor]:
    config = _config(as_json)
    kept = keep(x, config, draw_seed())
    if kept[1] is not x:
        return list(kept)
    # Too few rows to compress. An operator may not return its input, nor fewer tensors than for a larger batch.
    mean = [x.new_zeros(x.shape[1])] if config.center else []
    return [kept[0], x.clone(memory_format=torch.contiguous_format), *mean]


@_keep.register_fake
def _shapes_kept(x: Tensor, as_json: str) -> list[Tensor]:
    config = _config(as_json)
    rows, features = x.shape
    dim = config.dim_for(rows)
    seed = torch.empty((), dtype=torch.int64, device="cpu")
    mean = [x.new_empty(features)] if config.center else []
    if config.bits is None:
        return [seed, x.new_empty(dim, features), *mean]
    codes = x.new_empty(dim, packed_bytes(features, config.bits), dtype=torch.uint8)
    return [seed, codes, x.new_empty(dim, group_count(features), 2, dtype=compute_dtype(x.dtype)), *mean]


@torch.library.custom_op(
    "backsketch::weight_gradient",
    mutates_args=(),
    schema="(Tensor[] kept, Tensor y, SymInt in_features, Tensor? valid, str config) -> Tensor",
    **_TAGS,
)
def _weight_gradient(kept: list[Tensor], y: Tensor, in_features: int, valid: Tensor | None, as_json: str) -> Tensor:
    return weight_gradient(tuple(kept), y, _config(as_json), in_features, valid)


@_weight_gradient.register_fake
def _(kept: list[Tensor], y: Tensor, in_features: int, valid: Tensor | None, as_json: str) -> Tensor:
    return y.new_empty(y.shape[1], in_features)


# Not a custom_op, which takes five times as long to call; nor is this one ever part of a compiled graph.
_library: Any = torch.library.Library("backsketch", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("keep_or_share(Tensor source, Tensor x, Tensor seed, int reader, str config) -> Tensor[]")


def _keep_or_share(source: Tensor, x: Tensor, seed: Tensor, reader: int, as_json: str) -> list[Tensor]:
    valid, kept = keep_or_share(source, x, seed.clone(), reader, _config(as_json))  # an operator returns no argument
    return [_no_rows(x) if valid is None else valid, *kept]


def _shapes_kept_or_shared(source: Tensor, x: Tensor, seed: Tensor, reader: int, as_json: str) -> list[Tensor]:
    # A fake seed has no value to find the mask by when a checkpointed region runs again.
    valid = None if inside_checkpoint() else masked_rows(x)
    return [_no_rows(x) if valid is None else valid, *_shapes_kept(as_rows(x), as_json)]


def _no_rows(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.bool)


_library.impl("keep_or_share", _keep_or_share, "CompositeExplicitAutograd")
torch.library.register_fake("backsketch::keep_or_share", _shapes_kept_or_shared, lib=_library)


# What an operator runs, for a mode that is to see the steps of a sketch outside of compiled code.
OPAQUE: dict[Any, Any] = {torch.ops.backsketch.keep_or_share.default: _keep_or_share}


@lru_cache(maxsize=1024)
def _config(as_json: str) -> SketchConfig:
    return SketchConfig(**json.loads(as_json))

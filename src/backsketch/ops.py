"""What others see of a sketch where it is one step: opaque operators for torch.compile, checkpointing, fake tensors.

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

from .config import SketchConfig
from .inputs import as_rows
from .kept import keep, weight_gradient
from .padding import masked_rows
from .reading import keep_or_share
from .seeds import draw_seed
from .sharing import Kept
from .sketches.base import compute_dtype
from .storage import group_count, packed_bytes

# A generator made and seeded in the middle of a captured CUDA graph would be frozen into it.
_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


def traced_keep(x: Tensor, spelled: str) -> tuple[Tensor, ...]:
    """Draw a seed and return what to keep of x, the seed first: x (rows, in_features) -> tensors."""
    return tuple(_keep(x, spelled))


def traced_weight_gradient(
    kept: tuple[Tensor, ...], y: Tensor, spelled: str, in_features: int, valid: Tensor | None = None
) -> Tensor:
    """Return the unbiased estimate of Yᵀ X: kept, y (rows, out_features) -> (out_features, in_features)."""
    out: Tensor = _weight_gradient(list(kept), y, in_features, valid, spelled)
    return out


def opaque_keep(source: Tensor, x: Tensor, seed: Tensor, reader: int, spelled: str) -> tuple[Tensor | None, Kept]:
    """Do what ``keep_or_share`` does, as one operator; x (..., in_features)."""
    valid, *kept = torch.ops.backsketch.keep_or_share(source, x, seed, reader, spelled)
    return (valid if valid.numel() else None), tuple(kept)


@torch.library.custom_op("backsketch::keep", mutates_args=(), schema="(Tensor x, str config) -> Tensor[]", **_TAGS)
def _keep(x: Tensor, spelled: str) -> list[Tensor]:
    config = _config(spelled)
    kept = keep(x, config, draw_seed())
    if kept[1] is not x:
        return list(kept)
    # Too few rows to compress. An operator may not return its input, nor fewer tensors than for a larger batch.
    mean = [x.new_zeros(x.shape[1])] if config.center else []
    return [kept[0], x.clone(memory_format=torch.contiguous_format), *mean]


@_keep.register_fake
def _shapes_kept(x: Tensor, spelled: str) -> list[Tensor]:
    config = _config(spelled)
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
def _weight_gradient(kept: list[Tensor], y: Tensor, in_features: int, valid: Tensor | None, spelled: str) -> Tensor:
    return weight_gradient(tuple(kept), y, _config(spelled), in_features, valid)


@_weight_gradient.register_fake
def _(kept: list[Tensor], y: Tensor, in_features: int, valid: Tensor | None, spelled: str) -> Tensor:
    return y.new_empty(y.shape[1], in_features)


# Not a custom_op, which takes five times as long to call; nor is this one ever part of a compiled graph.
_library: Any = torch.library.Library("backsketch", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("keep_or_share(Tensor source, Tensor x, Tensor seed, int reader, str config) -> Tensor[]")


def _keep_or_share(source: Tensor, x: Tensor, seed: Tensor, reader: int, spelled: str) -> list[Tensor]:
    valid, kept = keep_or_share(source, x, seed.clone(), reader, _config(spelled))  # an operator returns no argument
    return [_no_rows(x) if valid is None else valid, *kept]


def _shapes_kept_or_shared(source: Tensor, x: Tensor, seed: Tensor, reader: int, spelled: str) -> list[Tensor]:
    valid = masked_rows(x)
    return [_no_rows(x) if valid is None else valid, *_shapes_kept(as_rows(x), spelled)]


def _no_rows(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.bool)


_library.impl("keep_or_share", _keep_or_share, "CompositeExplicitAutograd")
torch.library.register_fake("backsketch::keep_or_share", _shapes_kept_or_shared, lib=_library)


# What an operator runs, for a mode that is to see the steps of a sketch outside of compiled code.
OPAQUE: dict[Any, Any] = {torch.ops.backsketch.keep_or_share.default: _keep_or_share}


@lru_cache(maxsize=1024)
def _config(spelled: str) -> SketchConfig:
    return SketchConfig(**json.loads(spelled))

"""What a sketched layer runs under torch.compile: its steps as custom operators, which the compiler cannot look into.

One operator draws the seed and makes the sketch, and returns both. Traced code would not do: the compiler may draw its
random numbers again in backward, which then uses another S, and E[∂W] is near 0. The compiler merges equal calls of an
operator, so q, k and v, which read one tensor, keep one sketch of it.

A config is passed to an operator as one JSON string. If its numbers were arguments, the compiler would turn those in
which layers differ into inputs of the graph, and it could not know the shape of what is kept.

Selective checkpointing and fake tensors use the operators too. Selective checkpointing caches results of operations
and finds them again by their order, so both passes of a layer must run the same operations. Inside one operator they
may differ: one pass may find what another layer has kept, and the other may not.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..config import SketchConfig
from ..masks.scopes import masked_rows
from ..numerics import as_rows
from ..seeds import draw_seed
from ..storage.stored_rows import StoredRows
from .checkpointing import inside_checkpoint
from .keeping import keep
from .sharing import Kept, keep_or_share
from .weight_gradient import weight_gradient

# A captured CUDA graph would replay the same seed in every step.
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
    # Too few rows to compress. An operator may not return its input, nor fewer tensors than it does for larger batches.
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
    stored = StoredRows.empty(x, dim, features, config.bits, config.rotate, seed)
    return [seed, stored.codes, stored.ranges, *mean]


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


# Not a custom_op, which takes five times as long to call. Compiled graphs never contain this operator.
_library: Any = torch.library.Library("backsketch", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("keep_or_share(Tensor source, Tensor x, Tensor seed, int reader, str config) -> Tensor[]")


def _keep_or_share(source: Tensor, x: Tensor, seed: Tensor, reader: int, as_json: str) -> list[Tensor]:
    valid, kept = keep_or_share(source, x, seed.clone(), reader, _config(as_json))  # an operator returns no argument
    return [_no_rows(x) if valid is None else valid, *kept]


def _shapes_kept_or_shared(source: Tensor, x: Tensor, seed: Tensor, reader: int, as_json: str) -> list[Tensor]:
    # When a checkpointed region runs again, its mask is found by the seed, and a fake seed has no value.
    valid = None if inside_checkpoint() else masked_rows(x)
    return [_no_rows(x) if valid is None else valid, *_shapes_kept(as_rows(x), as_json)]


def _no_rows(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.bool)


_library.impl("keep_or_share", _keep_or_share, "CompositeExplicitAutograd")
torch.library.register_fake("backsketch::keep_or_share", _shapes_kept_or_shared, lib=_library)


# Operator -> the function behind it, so that peak_memory can run that function and see each of its steps.
OPAQUE: dict[Any, Any] = {torch.ops.backsketch.keep_or_share.default: _keep_or_share}


@lru_cache(maxsize=1024)
def _config(as_json: str) -> SketchConfig:
    return SketchConfig(**json.loads(as_json))

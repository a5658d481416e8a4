"""Measure single layers: their time for every way to store rows and every kind, their peak, and a call's own cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from backsketch import SketchConfig

from .contenders import EXACT, RATIOS, Contender, kind_contenders, layer_contenders, ours
from .speed_steps import converted, layer_bytes, layer_peak, layer_step
from .timing import best_times

BASE_SHAPES = ((768, 3072), (3072, 768))  # of a base-size transformer
SHAPES = (*BASE_SHAPES, (384, 384), (384, 1536))  # and of a small one


def layers(quick: bool, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Time one linear layer, forward and backward, for each shape and each way to store its rows."""
    return _timed(layer_contenders(dtype), SHAPES, quick, dtype)


def kinds(quick: bool) -> list[dict[str, Any]]:
    """Time one linear layer in fp32 for each kind of sketch at several ratios."""
    return _timed([EXACT, *kind_contenders()], BASE_SHAPES, quick, torch.float32)


def _timed(
    ways: Sequence[Contender], shapes: Sequence[tuple[int, int]], quick: bool, dtype: torch.dtype
) -> list[dict[str, Any]]:
    rows, rounds = layer_rows(quick), 2 if quick else 12
    found: dict[str, dict[str, Any]] = {}
    for features, outputs in shapes:
        shape = f"{features} -> {outputs}"
        x, y = torch.randn(rows, features, dtype=dtype, requires_grad=True), torch.randn(rows, outputs, dtype=dtype)
        layer = nn.Linear(features, outputs, dtype=dtype)
        steps = {way.name: layer_step(way, layer, x, y) for way in ways}
        times = best_times(steps, rounds=rounds, title=f"{str(dtype).removeprefix('torch.')}, {shape}")
        for way in ways:
            entry = found.setdefault(way.name, {"name": way.name, "family": way.family, "ratio": way.ratio})
            entry.setdefault("seconds", {})[shape] = times[way.name]
            entry.setdefault("speeds", {})[shape] = times["exact"] / times[way.name]
            entry.setdefault("kept", {})[shape] = layer_bytes(way, layer, x)
    for entry in found.values():
        base = list(entry["speeds"].values())[: len(BASE_SHAPES)]
        entry["speed"] = sum(base) / len(base)
    return list(found.values())


def transient(quick: bool) -> list[dict[str, Any]]:
    """Compare the peak of a layer's step with nn.Linear's, where the caller holds the input in both cases."""
    rows = 4096 if quick else 65536
    x, y = torch.randn(rows, 768, requires_grad=True), torch.randn(rows, 768)
    layer = nn.Linear(768, 768)
    few = (way for way in kind_contenders() if way.ratio == min(RATIOS))
    ways = {way.name: way for way in (*layer_contenders(x.dtype), *few)}.values()
    peaks = {way.name: layer_peak(way, layer, x, y) for way in ways}
    kept = {way.name: layer_bytes(way, layer, x) for way in ways}
    return [
        {"name": name, "rows": rows, "beyond_linear": peak - peaks["exact"], "kept": kept[name]}
        for name, peak in peaks.items()
    ]


def overhead(quick: bool) -> list[dict[str, Any]]:
    """Time a tiny layer, 64 rows of 64 -> 64, where only the cost of the call itself counts."""
    x, y, layer = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64), nn.Linear(64, 64)
    ways = [
        EXACT,
        ours("rows", SketchConfig(ratio=0.5)),
        ours("hash", SketchConfig(kind="hash", ratio=0.5)),
    ]
    found = []
    models = {way.name: converted(way, layer) for way in ways}
    forward = best_times(
        {name: partial(own, x) for name, own in models.items()},
        rounds=20,
        repeat=50 if quick else 500,
        title="forward",
    )
    step = best_times(
        {way.name: layer_step(way, layer, x, y) for way in ways}, rounds=20, repeat=50 if quick else 500, title="step"
    )
    for name in models:
        found.append({"name": name, "forward_us": forward[name] * 1e6, "step_us": step[name] * 1e6})
    return found


def layer_rows(quick: bool) -> int:
    """Return the rows of the batch."""
    return 512 if quick else 4096

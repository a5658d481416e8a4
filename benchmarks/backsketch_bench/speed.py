"""The speed of a training step, beside nn.Linear, the paper's method, checkpointing, offloading and int8 storage.

Every figure is a ratio of times taken in one process, interleaved, the best of several rounds. Finished parts stay
in the record and are measured again only on request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backsketch import SketchConfig
from backsketch.programs.result_files import write_record

from .contenders import EXACT, Contender, encoder_contenders, layer_contenders, ours
from .speed_steps import (
    converted,
    layer_bytes,
    layer_peak,
    layer_step,
    model_bytes,
    model_step,
    sketch_step,
    slope,
)
from .timing import best_times

Show = Callable[[dict[str, Any], str], object]

SHAPES = ((768, 3072), (3072, 768))
SKETCHED = ("gaussian", "rademacher", "hadamard", "cosine", "fourier")


def layers(quick: bool) -> list[dict[str, Any]]:
    """Time one linear layer, forward and backward, for each shape of a base-size transformer."""
    rows, rounds = _layer_rows(quick), 2 if quick else 12
    found: dict[str, dict[str, Any]] = {}
    for features, outputs in SHAPES:
        x, y = torch.randn(rows, features, requires_grad=True), torch.randn(rows, outputs)
        layer = nn.Linear(features, outputs)
        ways = layer_contenders()
        steps = {way.name: layer_step(way, layer, x, y) for way in ways}
        times = best_times(steps, rounds=rounds, title=f"layer {features} -> {outputs}")
        for way in ways:
            entry = found.setdefault(way.name, {"family": way.family, "ratio": way.ratio, "speeds": []})
            entry["speeds"].append(times["exact"] / times[way.name])
            entry.setdefault("kept", []).append(layer_bytes(way, layer, x))
    return [{**entry, "name": name, "speed": sum(entry["speeds"]) / len(SHAPES)} for name, entry in found.items()]


def encoder(quick: bool) -> list[dict[str, Any]]:
    """Time a whole encoder without dropout, and all alternatives."""
    return _encoder(encoder_contenders(), 0.0, quick)


def dropout(quick: bool) -> list[dict[str, Any]]:
    """Time the same encoder with the dropout it is fine-tuned with, whose masks torch draws on one core."""
    return _encoder([way for way in encoder_contenders() if way.family in ("exact", "rows")], 0.1, quick)


def _encoder(ways: list[Contender], dropout: float, quick: bool) -> list[dict[str, Any]]:
    """Time an encoder of RoBERTa-base's shapes, randomly initialised, forward and backward."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    depth, batch, length = _encoder_size(quick)
    config = RobertaConfig(
        num_hidden_layers=depth,
        vocab_size=1000,
        max_position_embeddings=length + 2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    config._attn_implementation, config.use_cache = "sdpa", False
    model = RobertaForSequenceClassification(config).train()
    inputs = {"input_ids": torch.randint(5, 1000, (batch, length)), "labels": torch.randint(0, 2, (batch,))}
    entries: list[dict[str, Any]] = []
    for way in ways:
        kept, peak = model_bytes(way, model, inputs)
        entries.append({"name": way.name, "family": way.family, "ratio": way.ratio, "kept": kept, "peak": peak})
    times = best_times(
        {way.name: model_step(way, model, inputs) for way in ways},
        rounds=1 if quick else 5,
        title="encoder",
        prepare={way.name: partial(way.applied, model) for way in ways},  # ten copies would not fit in memory
    )
    for entry in entries:
        entry["seconds"] = times[entry["name"]]
        entry["speed"] = times["exact"] / entry["seconds"]
    return entries


def growth(quick: bool) -> list[dict[str, Any]]:
    """Time the sketch itself (compress X, compress Y, multiply) as the rows grow, and fit the slope in log-log."""
    sizes = [1024 * 2**power for power in range(4 if quick else 7)]
    configs = {
        "rows": SketchConfig(ratio=0.1),
        "hash": SketchConfig(kind="hash", ratio=0.1),
        **{f"{kind}, block 128": SketchConfig(kind=kind, ratio=0.1, block=128) for kind in SKETCHED},
    }
    full = {"gaussian, full size": SketchConfig(kind="gaussian", ratio=0.1)}
    times: dict[str, list[float]] = {name: [] for name in (*configs, *full)}
    for rows in sizes:
        x, y = torch.randn(rows, 256), torch.randn(rows, 256)
        for group, rounds in ((configs, 12), (full, 2)):  # the full size takes seconds
            steps = {name: sketch_step(config, x, y) for name, config in group.items()}
            for name, seconds in best_times(steps, rounds=rounds, title=f"{rows} rows").items():
                times[name].append(seconds)
    found: list[dict[str, Any]] = []
    for name, own in times.items():
        slopes = {"slope": slope(sizes, own), "last_slope": slope(sizes[-4:], own[-4:])}
        found.append({"name": name, "rows": sizes, "seconds": own, **slopes})
    return found


def transient(quick: bool) -> list[dict[str, Any]]:
    """Compare the peak of a layer's step with nn.Linear's, where the caller holds the input in both cases."""
    rows = 4096 if quick else 65536
    x, y = torch.randn(rows, 768, requires_grad=True), torch.randn(rows, 768)
    layer = nn.Linear(768, 768)
    ways = [way for way in layer_contenders() if way.ratio in (0.1, 1) and way.family != "offload (save_on_cpu)"]
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


PARTS: dict[str, Callable[[bool], list[dict[str, Any]]]] = {
    "layers": layers,
    "overhead": overhead,
    "transient": transient,
    "growth": growth,
    "encoder": encoder,
    "dropout": dropout,
}


def run(
    parts: Sequence[str], path: Path, *, quick: bool = False, fresh: bool = False, show: Show | None = None
) -> dict[str, Any]:
    """Measure the parts that the record at ``path`` does not have yet, write each when it is done, return the record.

    Args:
        fresh: measure all of the parts again.
        show: called with the record and a part's name as soon as the part is measured.
    """
    settings = {
        "quick": quick,
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "layer rows": _layer_rows(quick),
        "encoder blocks": _encoder_size(quick)[0],
        "encoder batch": "{1} x {2}".format(*_encoder_size(quick)),
    }
    record = json.loads(path.read_text()) if path.exists() else {"settings": settings, "results": {}}
    same = all(record["settings"][name] == settings[name] for name in ("quick", "threads"))
    if not (same or fresh):
        made = "{}, threads={threads}".format("quick" if record["settings"]["quick"] else "full", **record["settings"])
        raise ValueError(f"{path} was made with other settings ({made}): give --fresh to replace it, or another --out")
    results = dict(record["results"]) if same else {}
    for name in parts:
        if fresh or name not in results:
            torch.manual_seed(0)
            results[name] = PARTS[name](quick)
            record = json.loads(write_record(path, settings=settings, results=results).read_text())
        if show is not None:
            show(record, name)
    return record


def _layer_rows(quick: bool) -> int:
    return 512 if quick else 4096


def _encoder_size(quick: bool) -> tuple[int, int, int]:
    """Return blocks, batch and length; with fewer tokens the peak would be weights and their gradients alone."""
    return (1, 16, 64) if quick else (12, 32, 128)

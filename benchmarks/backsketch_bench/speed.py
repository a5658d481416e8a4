"""How fast a training step is beside nn.Linear, the paper's method, checkpointing, offloading and int8 storage.

    python benchmarks/speed.py                  everything, about 25 minutes on two cores
    python benchmarks/speed.py --part layers    one part: layers, encoder, growth, transient, overhead
    python benchmarks/speed.py --quick          small sizes, to see that it runs

Every figure is a ratio of times taken in one process, interleaved, the best of several rounds. Finished parts are kept
in the record and not measured again until --fresh.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from backsketch import SketchConfig
from backsketch.results import write_record

from .contenders import EXACT, encoder_contenders, layer_contenders, ours
from .speed_report import render
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

SHAPES = ((768, 3072), (3072, 768))
SKETCHED = ("gaussian", "rademacher", "hadamard", "cosine", "fourier")


def layers(quick: bool) -> list[dict[str, Any]]:
    """Time one linear layer, forward and backward, for each shape of a base-size transformer."""
    rows, rounds = (512, 2) if quick else (4096, 12)
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
    """Time a randomly initialised encoder of RoBERTa-base's shapes, forward and backward, batch 32 × 128."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    depth, batch, length, rounds = (1, 4, 16, 1) if quick else (12, 32, 128, 2)
    config = RobertaConfig(num_hidden_layers=depth, vocab_size=1000, max_position_embeddings=length + 2)
    config._attn_implementation = "sdpa"
    model = RobertaForSequenceClassification(config).train()
    inputs = {"input_ids": torch.randint(5, 1000, (batch, length)), "labels": torch.randint(0, 2, (batch,))}
    ways = encoder_contenders()
    entries = []
    for way in ways:
        kept, peak = model_bytes(way, model, inputs)
        entries.append({"name": way.name, "family": way.family, "ratio": way.ratio, "kept": kept, "peak": peak})
    times = best_times(
        {way.name: model_step(way, model, inputs) for way in ways},
        rounds=rounds,
        title="encoder",
        prepare={way.name: partial(way.applied, model) for way in ways},  # ten copies would not fit in memory
    )
    return [{**entry, "speed": times["exact"] / times[entry["name"]]} for entry in entries]


def growth(quick: bool) -> list[dict[str, Any]]:
    """Time the sketch itself (compress X, compress Y, multiply) as the rows grow, and fit the slope in log-log."""
    sizes = [1024 * 2**power for power in range(4 if quick else 7)]
    found = []
    configs = {
        "rows": SketchConfig(ratio=0.1),
        "hash": SketchConfig(kind="hash", ratio=0.1),
        **{f"{kind}, block 128": SketchConfig(kind=kind, ratio=0.1, block=128) for kind in SKETCHED},
        "gaussian, full size": SketchConfig(kind="gaussian", ratio=0.1),
    }
    times: dict[str, list[float]] = {name: [] for name in configs}
    for rows in sizes:
        x, y = torch.randn(rows, 256), torch.randn(rows, 256)
        steps = {name: sketch_step(config, x, y) for name, config in configs.items()}
        for name, seconds in best_times(steps, rounds=2 if rows > 16384 else 5, title=f"{rows} rows").items():
            times[name].append(seconds)
    for name, seconds in times.items():
        found.append({"name": name, "rows": sizes, "seconds": seconds, "slope": slope(sizes[-4:], seconds[-4:])})
    return found


def transient(quick: bool) -> list[dict[str, Any]]:
    """Compare the peak of a layer's step with nn.Linear's, the input being held by someone else in both."""
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
        {name: lambda own=own: own(x) for name, own in models.items()},
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
}


def main(
    part: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PARTS)}; all by default.")] = None,
    out: Annotated[Path, typer.Option(help="Where the record, the plot and the report go.")] = Path(
        "benchmarks/reports"
    ),
    quick: Annotated[bool, typer.Option(help="Small sizes, to see that it runs.")] = False,
    fresh: Annotated[bool, typer.Option(help="Measure again what the record already has.")] = False,
    threads: Annotated[int, typer.Option(help="Threads for torch.")] = 2,
) -> None:
    """Measure, print tables, write speed.json, speed.png and a dated report."""
    chosen = part or list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        raise typer.BadParameter(f"part must be one of {', '.join(PARTS)}, got {', '.join(unknown)}")
    torch.set_num_threads(threads)
    path = out / "speed.json"
    results = json.loads(path.read_text())["results"] if path.exists() and not (fresh and part is None) else {}
    for name in chosen:
        if name in results and not fresh:
            continue
        torch.manual_seed(0)
        results[name] = PARTS[name](quick)
        settings = {
            "quick": quick,
            "threads": threads,
            "dtype": "float32",
            "layer rows": 4096,
            "encoder batch": "32 x 128",
        }
        write_record(path, settings=settings, results=results)
        _print(name, results[name])
    for written in render(path):
        print(written)


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    names = [name for name, value in rows[0].items() if not isinstance(value, list)]
    table = Table(*names, title=title)
    for row in rows:
        table.add_row(*(f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in names))
    Console().print(table)

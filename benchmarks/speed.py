"""How fast a training step is beside nn.Linear, the paper's method, checkpointing, offloading and int8 storage.

    python benchmarks/speed.py                  everything, about 25 minutes on two cores
    python benchmarks/speed.py --part layers    one part: layers, encoder, growth, transient, overhead
    python benchmarks/speed.py --quick          small sizes, to see that it runs

Every figure is a ratio of times taken in one process, interleaved, the best of several rounds. Finished parts are kept
in the record and not measured again until --fresh.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from contenders import Contender, encoder_contenders, layer_contenders, ours
from record import write_record
from rich.console import Console
from rich.table import Table
from speed_report import render
from timing import best_times
from torch import Tensor, nn

from backsketch import SketchConfig, peak_memory, saved_memory
from backsketch.kept import keep, weight_gradient
from backsketch.seeds import draw_seed

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
        steps = {way.name: _layer_step(way, layer, x, y) for way in ways}
        times = best_times(steps, rounds=rounds, title=f"layer {features} -> {outputs}")
        for way in ways:
            entry = found.setdefault(way.name, {"family": way.family, "ratio": way.ratio, "speeds": []})
            entry["speeds"].append(times["exact"] / times[way.name])
            entry.setdefault("kept", []).append(_layer_bytes(way, layer, x, y))
    return [{**entry, "name": name, "speed": sum(entry["speeds"]) / len(SHAPES)} for name, entry in found.items()]


def encoder(quick: bool) -> list[dict[str, Any]]:
    """Time a randomly initialised encoder of RoBERTa-base's shapes, forward and backward, batch 32 × 128."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    depth, batch, length, rounds = (1, 4, 16, 1) if quick else (12, 32, 128, 2)
    config = RobertaConfig(num_hidden_layers=depth, vocab_size=1000, max_position_embeddings=length + 2)
    config._attn_implementation = "sdpa"
    model = RobertaForSequenceClassification(config).train()
    inputs = {"input_ids": torch.randint(5, 1000, (batch, length)), "labels": torch.randint(0, 2, (batch,))}
    steps, entries = {}, []
    for way in encoder_contenders():
        own = copy.deepcopy(model)
        way.convert(own)
        steps[way.name] = _model_step(way, own, inputs)
        with saved_memory(own) as saved, way.context():
            loss = own(**inputs).loss
        kept = saved.activations
        del loss
        with peak_memory(own) as peak:
            steps[way.name]()
        entries.append({"name": way.name, "family": way.family, "ratio": way.ratio, "kept": kept, "peak": peak.total})
    times = best_times(steps, rounds=rounds, title="encoder")
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
        steps = {name: _sketch_step(config, x, y) for name, config in configs.items()}
        for name, seconds in best_times(steps, rounds=2 if rows > 16384 else 5, title=f"{rows} rows").items():
            times[name].append(seconds)
    for name, seconds in times.items():
        found.append({"name": name, "rows": sizes, "seconds": seconds, "slope": _slope(sizes[-4:], seconds[-4:])})
    return found


def transient(quick: bool) -> list[dict[str, Any]]:
    """Compare the peak of a layer's step with nn.Linear's, the input being held by someone else in both."""
    rows = 4096 if quick else 65536
    x, y = torch.randn(rows, 768, requires_grad=True), torch.randn(rows, 768)
    layer = nn.Linear(768, 768)
    ways = [way for way in layer_contenders() if way.ratio in (0.1, 1) and way.family != "offload (save_on_cpu)"]
    peaks = {way.name: _layer_peak(way, layer, x, y) for way in ways}
    kept = {way.name: _layer_bytes(way, layer, x, y) for way in ways}
    return [
        {"name": name, "rows": rows, "beyond_linear": peak - peaks["exact"], "kept": kept[name]}
        for name, peak in peaks.items()
    ]


def overhead(quick: bool) -> list[dict[str, Any]]:
    """Time a tiny layer, 64 rows of 64 -> 64, where only the cost of the call itself counts."""
    x, y, layer = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64), nn.Linear(64, 64)
    ways = [
        Contender("exact", 1),
        ours("rows", SketchConfig(ratio=0.5)),
        ours("hash", SketchConfig(kind="hash", ratio=0.5)),
    ]
    found = []
    models = {way.name: _converted(way, layer) for way in ways}
    forward = best_times(
        {name: lambda own=own: own(x) for name, own in models.items()},
        rounds=20,
        repeat=50 if quick else 500,
        title="forward",
    )
    step = best_times(
        {way.name: _layer_step(way, layer, x, y) for way in ways}, rounds=20, repeat=50 if quick else 500, title="step"
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


def _converted(way: Contender, layer: nn.Module) -> nn.Module:
    own = copy.deepcopy(layer)
    way.convert(own)
    return own


def _layer_step(way: Contender, layer: nn.Linear, x: Tensor, y: Tensor) -> Callable[[], None]:
    own = _converted(way, layer)

    def step() -> None:
        own.zero_grad(set_to_none=True)
        x.grad = None
        with way.context():
            out = own(x)
        out.backward(y)

    return step


def _layer_bytes(way: Contender, layer: nn.Linear, x: Tensor, y: Tensor) -> int:
    own = _converted(way, layer)
    with saved_memory(own) as saved, way.context():
        out = own(x)
    kept = saved.activations
    del out
    return kept


def _layer_peak(way: Contender, layer: nn.Linear, x: Tensor, y: Tensor) -> int:
    step = _layer_step(way, layer, x, y)
    with peak_memory() as peak:
        step()
    return peak.total


def _model_step(way: Contender, model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], None]:
    def step() -> None:
        with way.context():
            loss = model(**inputs).loss
        loss.backward()
        model.zero_grad(set_to_none=True)  # the gradients of ten models do not fit at once

    return step


def _sketch_step(config: SketchConfig, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    return lambda: weight_gradient(keep(x, config, draw_seed()), y, config, x.shape[1])


def _slope(sizes: list[int], seconds: list[float]) -> float:
    """Return the least-squares slope of log time over log rows."""
    logs = [(math.log(size), math.log(second)) for size, second in zip(sizes, seconds, strict=True)]
    x, y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    return sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    names = [name for name, value in rows[0].items() if not isinstance(value, list)]
    table = Table(*names, title=title)
    for row in rows:
        table.add_row(*(f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in names))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

"""Fine-tune an encoder under NoiseLimit, and note noise, bytes and loss over time.

A record also has what fixed configs, the same for all layers, would have added at each measured step.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorWithPadding

import backsketch as bs
from backsketch.control.layer_averages import LayerAverages
from backsketch.control.limit_choice import GroupChoice
from backsketch.monitor.noise_records import Record, add_up
from backsketch.programs.glue.loading import encode, load
from backsketch.programs.glue.reading import read_task
from backsketch.programs.glue.settings import Settings

BATCH, RATE, MEASURED, EVERY, WARMUP, EVALUATED = 32, 1e-4, 5, 15, 0.06, 400
START = bs.SketchConfig(ratio=1.0, bits=4, rotate=True)


def described(**settings: Any) -> dict[str, Any]:
    """Return the settings of a record."""
    return {
        **settings, "batch": BATCH, "learning_rate": RATE, "measured_every": MEASURED, "changed_at_most_every": EVERY,
        "start": asdict(START), "evaluated": EVALUATED,
    }  # fmt: skip


def train(
    weights: Path, data: Path, *, model: str, task: str, limit: float | None, steps: int, seed: int
) -> dict[str, Any]:
    """Train some steps, exactly if there is no limit, and return what was measured."""
    settings = Settings(task=task, model=str(weights / model), data=data, config=START, seed=seed)
    torch.manual_seed(seed)
    encoder, tokenizer = load(settings)
    examples, held_out = read_task(settings.the_task, data)
    chosen = encode(examples.subset(BATCH * steps), encoder, tokenizer, settings.the_recipe.max_length)
    random.Random(seed).shuffle(chosen)
    collate = DataCollatorWithPadding(tokenizer)
    evaluation = encode(held_out.subset(EVALUATED), encoder, tokenizer, settings.the_recipe.max_length)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=RATE, betas=(0.9, 0.98), eps=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (WARMUP * steps), (steps - step) / (steps * (1 - WARMUP)))
    )
    points: list[dict[str, Any]] = []
    controller = None
    if limit is not None:
        bs.sketch_(encoder, START, where=lambda name, module: not settings.excluded(name))
        monitor = bs.NoiseMonitor(encoder, every=MEASURED).start()
        fixed = {str(config): config for config in _fixed_configs()}

        def note(records: list[Record]) -> None:
            assert controller is not None
            totals = add_up(records)
            averages = {name: LayerAverages() for name in controller.configs}
            for record in records:
                of_layer = averages[str(record["layer"])]
                of_layer.update(record, controller.configs[str(record["layer"])], 1)
                of_layer.shares.add(int(record["valid_rows"]) / int(record["rows"]))
            choices = [GroupChoice(group, monitor.layers, averages) for group in controller.groups]
            sgd = sum(choice.sgd for choice in choices)
            under = {name: [choice.point(config) for choice in choices] for name, config in fixed.items()}
            points.append(
                {
                    "step": monitor.steps,
                    "noise": totals["sketch_variance"] / totals["sgd_variance"],
                    "bytes": sum(choice.point(choice.config).bytes for choice in choices),
                    "exact_bytes": sum(choice.exact_bytes for choice in choices),
                    "fixed": {
                        name: [sum(point.noise for point in own) / sgd, sum(point.bytes for point in own)]
                        for name, own in under.items()
                    },
                }
            )

        monitor.listen(note)  # before the controller listens: each point is of the configs that ran
        controller = bs.NoiseLimit(encoder, limit, EVERY, budget=1.0, monitor=monitor, callback=print)
    losses = []
    encoder.train()
    for step in range(steps):
        batch = collate(chosen[step * BATCH : (step + 1) * BATCH])
        loss = encoder(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 9:
            print(f"limit {limit}: step {step + 1}, loss {sum(losses[-10:]) / 10:.4f}", flush=True)
    results: dict[str, Any] = {
        "losses": losses,
        "points": points,
        "validation": _validation(encoder, evaluation, collate),
    }
    if controller is not None:
        results["changes"] = [asdict(change) for change in controller.changes]
        controller.stop()
        monitor.stop()
    return results


def _fixed_configs() -> list[bs.SketchConfig]:
    ratios = [step / 100 for step in (*range(10, 30, 2), *range(30, 60), *range(60, 101, 4))]
    return [bs.SketchConfig(ratio=ratio, bits=bits, rotate=True) for bits in (4, 3, 2) for ratio in ratios]


@torch.no_grad()
def _validation(model: nn.Module, examples: list[dict[str, Any]], collate: Any) -> dict[str, float]:
    model.eval()
    loss = right = 0.0
    for start in range(0, len(examples), 64):
        batch = collate(examples[start : start + 64])
        out = model(**batch)
        loss += float(out.loss) * len(batch["labels"])
        right += float((out.logits.argmax(-1) == batch["labels"]).sum())
    return {"loss": loss / len(examples), "accuracy": right / len(examples)}

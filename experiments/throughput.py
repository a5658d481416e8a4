"""Relative throughput: samples a second of one model trained in several ways, interleaved in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

from backsketch import SketchConfig, sketch_, unsketch_
from backsketch_bench.timing import all_times


def compare(
    weights: Path,
    configs: Mapping[str, SketchConfig | None],
    *,
    model: str,
    batch_size: int,
    length: int,
    rounds: int,
    threads: int,
) -> dict[str, Any]:
    """Return for each way the seconds of its fastest step, its throughput relative to the first's, and that by round.

    One model is trained in all ways; it is converted outside the time that is taken.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    trained = AutoModelForSequenceClassification.from_pretrained(weights / model, num_labels=2).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.0, fused=True)
    words = torch.randint(5, trained.config.vocab_size, (batch_size, length))
    batch = {"input_ids": words, "labels": torch.randint(0, 2, (batch_size,))}
    encoder: nn.Module = trained.base_model

    @contextmanager
    def converted(config: SketchConfig | None) -> Iterator[None]:
        if config is not None:
            sketch_(encoder, config, lambda name, module: "pooler" not in name)
        yield
        unsketch_(encoder)

    def step() -> None:
        loss: Tensor = trained(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    times = all_times(
        dict.fromkeys(configs, step),
        prepare={name: partial(converted, config) for name, config in configs.items()},
        rounds=rounds,
        title=model,
    )
    exact = next(iter(times.values()))
    return {
        name: {
            "config": None if configs[name] is None else str(configs[name]),
            "step_seconds": min(seconds),
            "samples_per_second": batch_size / min(seconds),
            "relative": min(exact) / min(seconds),
            "relative_of_rounds": [one / own for one, own in zip(exact, seconds, strict=True)],
        }
        for name, seconds in times.items()
    }

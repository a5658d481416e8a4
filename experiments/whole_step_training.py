"""Train a pretrained language model with the whole step in few bits, beside exact training, from the same seeds.

    python experiments/whole_step_training.py --model DIR --text FILE [--steps 60] [--seeds 3] [--ways exact,whole]

Each way and seed is one JSON record in ``experiments/records/whole_step``; what has a record is not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

import backsketch as bs
from backsketch.programs.result_files import write_record

RECORDS = Path(__file__).parent / "records" / "whole_step"
BATCH, LENGTH, VALIDATION, RATE = 4, 128, 16, 1e-4

WAYS: dict[str, Callable[[nn.Module], object]] = {
    "exact": lambda model: model,
    "linear": bs.sketch_,
    "whole": lambda model: bs.sketch_(model, rest=True),
    "whole, 8 bits": lambda model: bs.sketch_(model, bs.SketchConfig(ratio=1.0, bits=8, rotate=True), rest=8),
}


def train(way: str, model: Path, text: Path, *, steps: int, seed: int) -> dict[str, object]:
    """Train for some steps on the first nine tenths of a text, and return losses, of the last tenth too."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokens = transformers.AutoTokenizer.from_pretrained(model)(text.read_text(encoding="utf-8"))["input_ids"]
    border = len(tokens) * 9 // 10
    torch.manual_seed(seed)
    language_model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    held_out = _windows(tokens[border:], [place * LENGTH for place in range(VALIDATION)])
    chosen = random.Random(seed)
    before = _validation(language_model, held_out)
    WAYS[way](language_model)
    language_model.train()
    optimizer = torch.optim.AdamW(language_model.parameters(), lr=RATE)
    losses, kept, began = [], 0, time.monotonic()
    for step in range(steps):
        ids = _windows(tokens[:border], [chosen.randrange(border - LENGTH) for _ in range(BATCH)])
        with bs.saved_memory(language_model) as saved:
            loss = language_model(input_ids=ids, labels=ids, use_cache=False).loss
        kept = saved.activations
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 9:
            print(f"{way}, seed {seed}: step {step + 1}, loss {losses[-1]:.4f}", flush=True)
    after = _validation(bs.unsketch_(language_model), held_out)
    return {
        "validation_before": before,
        "validation": after,
        "losses": losses,
        "kept": kept,
        "seconds": time.monotonic() - began,
    }


def _windows(tokens: list[int], starts: list[int]) -> Tensor:
    return torch.tensor([tokens[start : start + LENGTH] for start in starts])


@torch.no_grad()
def _validation(model: nn.Module, windows: Tensor) -> float:
    model.eval()
    losses = [model(input_ids=part, labels=part, use_cache=False).loss.item() for part in windows.split(BATCH)]
    return sum(losses) / len(losses)


def main() -> None:
    """Run the cells that have no record, and print the validation losses of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", default="exact,whole")
    options = parser.parse_args()
    for seed in range(options.seeds):
        for way in options.ways.split(","):
            path = RECORDS / f"{options.model.name}-{way.replace(', ', '-').replace(' ', '-')}-{seed}.json"
            if not path.exists():
                settings = {
                    "way": way, "seed": seed, "steps": options.steps, "model": options.model.name,
                    "text": options.text.name, "batch": BATCH, "length": LENGTH, "learning_rate": RATE,
                }  # fmt: skip
                results = train(way, options.model, options.text, steps=options.steps, seed=seed)
                write_record(path, settings=settings, results=results, packages=("transformers",))
            results = json.loads(path.read_text())["results"]
            print(f"{way}, seed {seed}: {results['validation_before']:.4f} -> {results['validation']:.4f}", flush=True)


if __name__ == "__main__":
    main()

"""How far the gradient of a pretrained language model is from exact with ``rest``, beside bf16 autocast.

    python experiments/rest_precision.py --model DIR --text FILE [--text FILE] [--windows 5]

Linear layers stay exact. Each error is that of the whole gradient: ‖g − exact‖² / ‖exact‖². The record,
``experiments/records/rest_precision.json``, is written after every window; what it has is not measured again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

import torch
import transformers
from torch import Tensor, nn

import backsketch as bs
from backsketch.programs.result_files import write_record

RECORD = Path(__file__).parent / "records" / "rest_precision.json"
SHAPES = ((1, 64), (2, 128), (4, 128))


def errors(model: nn.Module, words: Tensor, seed: int) -> dict[str, float]:
    """Return the relative squared errors of the gradient on one batch of windows: (windows, length)."""
    exact = _gradient(model, words)
    square = float(exact.double().square().sum())
    found = {"bf16 autocast": _distance(_gradient(model, words, autocast=True), exact) / square}
    for name, rest in (("rest=8", 8), ("rest=True", True)):
        bs.sketch_(model, {"*": None}, rest=rest)
        torch.manual_seed(seed)
        found[name] = _distance(_gradient(model, words), exact) / square
        bs.unsketch_(model)
    return found


def table(cells: dict[str, dict[str, float]]) -> str:
    """Return a line for each text and shape: mean over windows, least and largest."""
    lines: dict[str, list[dict[str, float]]] = {}
    for name, cell in cells.items():
        lines.setdefault(name.rpartition(", ")[0], []).append(cell)
    ways = list(next(iter(cells.values())))
    rows = [["text, batch", *ways], ["---"] * (len(ways) + 1)]
    for name, own in lines.items():
        rows.append([name, *(_told([cell[way] for cell in own]) for way in ways)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _gradient(model: nn.Module, words: Tensor, *, autocast: bool = False) -> Tensor:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=words, labels=words, use_cache=False).loss
    loss.backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).double().square().sum())


def _told(values: list[float]) -> str:
    return f"{mean(values):.1e} ({min(values):.1e} to {max(values):.1e})"


def main() -> None:
    """Measure what the record does not have, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--windows", type=int, default=5)
    options = parser.parse_args()
    cells: dict[str, dict[str, float]] = json.loads(RECORD.read_text())["results"] if RECORD.exists() else {}
    tokens = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
    for text in options.text:
        words = torch.tensor(tokens(text.read_text(encoding="utf-8")[:200_000])["input_ids"])
        for shape in SHAPES:
            for window in range(options.windows):
                name = f"{text.stem}, {shape[0]} × {shape[1]}, {window}"
                if name not in cells:
                    size = shape[0] * shape[1]
                    cells[name] = errors(model, words[window * size : (window + 1) * size].view(shape), window)
                    settings = {"model": options.model.name, "windows": options.windows, "linear layers": "exact"}
                    write_record(RECORD, settings=settings, results=cells, packages=("transformers",))
                    print(name, cells[name], flush=True)
    print(table(cells))


if __name__ == "__main__":
    main()

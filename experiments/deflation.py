"""Does an exact rank-r part earn its bytes? Its noise and time beside rows, centred rows and few bits, at equal bytes.

python experiments/deflation.py --model DIR --data train.tsv --columns Quality '#1 String' '#2 String'
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from deflated import DeflatedLinear, Deflation
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from backsketch import SketchConfig, noise, sketch_, valid_rows
from backsketch.programs.page_keeping import restart_keeping_pages
from backsketch.programs.result_files import write_record
from backsketch.storage.sizes import stored_bytes
from backsketch_bench.activations import Activation, collect, token_layers, train
from backsketch_bench.frontier import settings
from backsketch_bench.frontier_points import main_layer
from backsketch_bench.progress import track
from backsketch_bench.subjects import find_subject
from backsketch_bench.timing import best_times

BUDGETS = (0.1, 0.05, 0.03)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to spend the bytes: an exact part of this rank (0: none), and rows of the rest."""

    name: str
    rank: int = 0
    power: int = 0
    bits: int | None = None
    center: bool = False

    def spend(self, budget: float, rows: int, features: int) -> Deflation | None:
        """Return the setting with the most rows that fit the budget; None if not even one does."""
        one = self._setting(1)
        row = stored_bytes(1, features, self.bits, 4)
        more = int(budget * rows * features * 4 - one.kept_bytes(rows, features)) // row
        return None if more < 0 else self._setting(min(1 + more, rows))

    def _setting(self, dim: int) -> Deflation:
        return Deflation(self.rank, self.power, SketchConfig(dim=dim, bits=self.bits, center=self.center))


WAYS = (
    Way("rows"),
    Way("rows, centred", center=True),
    Way("rows, rank 4", rank=4, power=1),
    Way("rows, rank 8, no power step", rank=8),
    Way("rows, rank 8", rank=8, power=1),
    Way("rows, rank 16", rank=16, power=1),
    Way("rows, 4 bits", bits=4),
    Way("rows, 4 bits, centred", bits=4, center=True),
    Way("rows, 4 bits, rank 2", rank=2, power=1, bits=4),
    Way("rows, 4 bits, rank 4", rank=4, power=1, bits=4),
    Way("rows, 4 bits, rank 8", rank=8, power=1, bits=4),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One way at one budget: what it really keeps, D² / D²_SGD over layers, and a layer's step time."""

    way: str
    budget: float
    bytes: float
    noise: float
    least: float
    most: float
    time: float


def main() -> None:
    """Measure, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a pretrained encoder for transformers; default: a small byte model")
    parser.add_argument("--data", type=Path, help="a tab-separated file without quoting, as GLUE has")
    parser.add_argument("--columns", nargs="+", metavar="COLUMN", help="LABEL TEXT [TEXT], by name or by number")
    parser.add_argument("--steps", type=int, help="training steps before measuring")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of timing; the best counts")
    parser.add_argument("--report", type=Path, default=Path("runs/deflation.json"), help="where to write the record")
    arguments = parser.parse_args()
    subject = find_subject(
        arguments.model, arguments.data, arguments.columns, steps=arguments.steps, seed=arguments.seed
    )
    loss = train(subject)
    layers = token_layers(collect(subject))
    results = compare(layers, WAYS, BUDGETS, rounds=arguments.rounds)
    Console().print(table(results))
    record = settings(subject, layers, loss=loss, rounds=arguments.rounds)
    path = write_record(arguments.report, settings=record, results=[asdict(result) for result in results])
    Console().print(f"wrote {path}")


def compare(
    layers: Sequence[Activation], ways: Sequence[Way], budgets: Sequence[float], *, rounds: int
) -> list[Result]:
    """Measure every way that fits every layer at every budget; all of them leave padded rows out."""
    shapes = [(layer.x.shape[:-1].numel(), layer.x.shape[-1]) for layer in layers]
    cells: dict[tuple[float, Way], list[Deflation]] = {}
    for budget in budgets:
        for way in ways:
            spent = [own for shape in shapes if (own := way.spend(budget, *shape)) is not None]
            if len(spent) == len(shapes):
                cells[budget, way] = spent
    main = main_layer(layers)
    place = next(place for place, layer in enumerate(layers) if layer is main)
    steps = {str((budget, way)): _step(main, spent[place]) for (budget, way), spent in cells.items()}
    times = best_times({"exact": _step(main, None), **steps}, rounds=rounds, title="step time")
    results = []
    for (budget, way), spent in track(cells.items(), "noise", len(cells)):
        kept = sum(own.kept_bytes(*shape) for own, shape in zip(spent, shapes, strict=True))
        ratios = torch.stack([_ratio(layer, own) for layer, own in zip(layers, spent, strict=True)])
        numbers = (
            kept / sum(4 * rows * features for rows, features in shapes),
            *(float(number) for number in (ratios.mean(), ratios.min(), ratios.max())),
            times[str((budget, way))] / times["exact"],
        )
        results.append(Result(way.name, budget, *(float(f"{number:.4g}") for number in numbers)))
    return results


def table(results: Sequence[Result]) -> Table:
    """Return the results as a table, one row each."""
    titles = ("way", "budget", "bytes kept", "noise / SGD noise", "least", "most", "step time")
    rendered = Table(title="An exact part of rank r, or more rows, or fewer bits: the same bytes")
    for title in titles:
        rendered.add_column(title, justify="left" if title == "way" else "right")
    last = None
    for result in results:
        if last not in (None, result.budget):
            rendered.add_section()
        last = result.budget
        noises = (f"{number:.3f}" for number in (result.noise, result.least, result.most))
        rendered.add_row(result.way, f"{result.budget:.0%}", f"{result.bytes:.2%}", *noises, f"{result.time:.2f}")
    return rendered


def _ratio(layer: Activation, setting: Deflation) -> Tensor:
    x, y = (part.reshape(-1, part.shape[-1]).double() for part in (layer.x, layer.y))
    assert layer.valid is not None
    return setting.variance(x, y, layer.valid.reshape(-1), seed=0) / noise.sgd_variance(x, y)


def _step(layer: Activation, setting: Deflation | None) -> Callable[[], object]:
    module: nn.Linear
    valid = layer.valid
    assert valid is not None
    if setting is not None and setting.rank:
        module = deflated = DeflatedLinear(layer.x.shape[-1], layer.y.shape[-1])
        deflated.deflation, deflated.valid = setting, valid.reshape(-1)
    else:
        module = nn.Linear(layer.x.shape[-1], layer.y.shape[-1])
        if setting is not None:
            sketch_(module, setting.config)
    x = layer.x.detach().clone().requires_grad_()
    wanted = (x, *module.parameters())

    def step() -> tuple[Tensor, ...]:
        with valid_rows(valid):
            out = module(x)
        return torch.autograd.grad(out, wanted, layer.y)

    return step


if __name__ == "__main__":
    restart_keeping_pages()
    main()

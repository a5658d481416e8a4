"""The frontier: what every setting keeps, the noise it adds, and the time it takes, on real activations.

python benchmarks/frontier.py
python benchmarks/frontier.py --model DIR --data train.tsv --columns Quality '#1 String' '#2 String'
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from backsketch.results import write_record

from .activations import Activation, Subject, add_arguments, collect, token_layers, trained_subject
from .frontier_choices import BUDGETS, Choice, grid, within
from .frontier_figure import write_figure
from .frontier_points import Point, main_layer, measure, step_times


def main() -> None:
    """Measure, print the table, write the record and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of timing; the best counts")
    parser.add_argument("--report", type=Path, default=Path("runs/frontier"), help="where to write, without suffix")
    arguments = parser.parse_args()
    subject, loss = trained_subject(arguments)
    layers = token_layers(collect(subject))
    points, budgets = frontier(layers, grid(), BUDGETS, rounds=arguments.rounds)
    Console().print(table(points))
    record = arguments.report.with_suffix(".json")
    used = settings(subject, layers, loss=loss, rounds=arguments.rounds)
    write_record(record, settings=used, results=results(points, budgets))
    for path in (record, *write_figure(record)):
        Console().print(f"wrote {path}")


def frontier(
    layers: Sequence[Activation], choices: Sequence[Choice], budgets: Sequence[float], *, rounds: int
) -> tuple[list[Point], dict[float, list[Point]]]:
    """Return the points of the choices with their times, and those of ``rows`` at each budget of bytes."""
    points = measure(layers, choices)
    spent = {budget: measure(layers, within(budget)) for budget in budgets}
    times = step_times(layers, choices, rounds=rounds)
    return [_timed(point, times[str(point.choice)]) for point in points], spent


def table(points: Sequence[Point]) -> Table:
    """Return the points as a table, one row each."""
    result = Table(title="What is kept, and the noise it adds to the weight gradient")
    for title in ("setting", "bytes kept", "noise / SGD noise", "least", "most", "step time"):
        result.add_column(title, justify="left" if title == "setting" else "right")
    for point in points:
        noise = (f"{number:.4f}" for number in (point.noise, point.least, point.most))
        time = "" if point.time is None else f"{point.time:.2f}"
        name = f"{point.choice} (the paper)" if point.choice.family == "paper" else str(point.choice)
        result.add_row(name, f"{point.bytes:.2%}", *noise, time)
    return result


def results(points: Sequence[Point], budgets: Mapping[float, Sequence[Point]]) -> dict[str, Any]:
    """Return the points for a JSON record."""
    spent = {str(budget): [point.as_record() for point in own] for budget, own in budgets.items()}
    return {"points": [point.as_record() for point in points], "budgets": spent}


def settings(subject: Subject, layers: Sequence[Activation], *, loss: float, rounds: int) -> dict[str, Any]:
    """Return what a record says of how its points were measured."""
    main = main_layer(layers)
    padding = 1 - sum(float(layer.valid.double().mean()) for layer in layers if layer.valid is not None) / len(layers)
    return {
        **subject.settings,
        "last_loss": round(loss, 4),
        "layers": len(layers),
        "padding": round(padding, 4),
        "timed_layer": main.name,
        "timed_shape": [main.x.shape[:-1].numel(), main.x.shape[-1], main.y.shape[-1]],
        "rounds": rounds,
    }


def _timed(point: Point, time: float) -> Point:
    return Point(point.choice, point.bytes, point.noise, point.least, point.most, time)

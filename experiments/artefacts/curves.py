"""Learning curves, training loss and evaluation: the paper's figure."""

from __future__ import annotations

from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from . import style
from .artefact import Artefact, Record, table, ways, where_from
from .names import ordered, shown
from .scores import cell, number

TASK, WINDOW = "CoLA", 40

Points = list[dict[str, float]]


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return curves, each the mean over the seeds there are, and the last values."""
    figure, (train, loss, score) = style.panels(3, (13, 4.6))
    lines = []
    for way in ordered(ways(records)):
        runs = [record["results"]["curves"] for record in records if record["cell"]["way"] == way]
        look = {**style.line(way), "label": shown(way).strip("*"), "linewidth": 1.6 if len(runs) > 1 else 0.8}
        train.plot(*_smooth(_mean([run["train"] for run in runs], "loss")), **{**look, "marker": ""})
        evaluated = [run["eval"] for run in runs]
        for axes, name, scale in ((loss, "loss", 1), (score, "score", 100)):
            found = _mean(evaluated, name)
            axes.plot(list(found), [scale * value for value in found.values()], markersize=5, **look)
        lines.append(
            [
                shown(way),
                cell([_smooth(_mean([run["train"]], "loss"))[1][-1] for run in runs], ".3f"),
                cell([number(points[-1]["loss"]) for points in evaluated], ".3f"),
                cell([100 * number(points[-1]["score"]) for points in evaluated]),
            ]
        )
    for axes, label in ((train, "training loss"), (loss, "evaluation loss"), (score, "Matthews correlation × 100")):
        axes.set(xlabel="step", ylabel=label)
    style.legend(figure, loss, 4)
    text = (
        f"{TASK}, means over the seeds there are (thin lines are of one seed); training loss is a running mean over "
        f"{WINDOW} logs. At the last step, with the standard deviation over seeds and their number:\n\n"
    )
    header = ["training", "training loss", "evaluation loss", "score"]
    return f"{text}{table(header, lines)}\n\n{where_from(records)}\n", figure


def _mean(runs: list[Points], name: str) -> dict[int, float]:
    """Return step -> the mean over runs, for the steps that all of them have."""
    by_step = [{int(point["step"]): number(point[name]) for point in points} for points in runs]
    return {step: mean(run[step] for run in by_step) for step in by_step[0] if all(step in run for run in by_step)}


def _smooth(losses: dict[int, float]) -> tuple[list[int], list[float]]:
    """Return steps and running means."""
    steps, values = list(losses), list(losses.values())
    window = min(WINDOW, len(values))
    return steps[window - 1 :], [mean(values[end - window : end]) for end in range(window, len(values) + 1)]


def _needed(labels: dict[str, Any]) -> bool:
    return bool(labels["task"] == TASK)


ARTEFACT = Artefact("curves", "Learning curves (figure)", ("glue",), render, _needed)

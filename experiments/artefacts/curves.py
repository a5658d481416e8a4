"""Learning curves, training loss and evaluation: the paper's figure."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from . import style
from .artefact import MISSING, Artefact, Record, select, table, ways, where_from
from .names import ordered, shown

TASK, WINDOW = "CoLA", 10


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return curves of seed 0, and the last values."""
    figure, (train, loss, score) = style.panels(3, (13, 4.6))
    lines = []
    for way in ordered(ways(records)):
        (record,) = select(records, "glue", way=way)
        learned = record["results"]["curves"]
        look = {**style.line(way), "label": shown(way).strip("*")}
        train.plot(*_smooth(learned["train"]), **{**look, "marker": ""})
        for axes, name, scale in ((loss, "loss", 1), (score, "score", 100)):
            axes.plot(
                [point["step"] for point in learned["eval"]],
                [scale * point[name] for point in learned["eval"]],
                markersize=5,
                **look,
            )
        last = learned["eval"][-1]
        smooth = _smooth(learned["train"])[1]
        lines.append(
            [
                shown(way),
                f"{smooth[-1]:.3f}" if smooth else MISSING,
                f"{last['loss']:.3f}",
                f"{100 * last['score']:.1f}",
            ]
        )
    for axes, label in ((train, "training loss"), (loss, "evaluation loss"), (score, "Matthews correlation × 100")):
        axes.set(xlabel="step", ylabel=label)
    style.legend(figure, loss, 4)
    text = f"{TASK}, seed 0; training loss is a mean over {WINDOW} logs. At the last step:\n\n"
    return text + table(
        ["training", "training loss", "evaluation loss", "score"], lines
    ) + f"\n\n{where_from(records)}\n", figure


def _smooth(points: list[dict[str, float]]) -> tuple[list[float], list[float]]:
    losses = [point["loss"] for point in points]
    means = [sum(losses[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(losses) + 1)]
    return [point["step"] for point in points[WINDOW - 1 :]], means


def _needed(labels: dict[str, Any]) -> bool:
    return labels["task"] == TASK and labels.get("seed", 0) == 0


ARTEFACT = Artefact("curves", "Learning curves (figure)", ("glue",), render, _needed)

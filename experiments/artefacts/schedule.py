"""Does a learning rate from the noise recover what a heavy sketch loses in a short fine-tuning?"""

from __future__ import annotations

from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from . import style
from .artefact import Artefact, Record, table, ways, where_from
from .scores import cell, late_loss, number, score

TASK, WINDOW = "SST-2", 12
_COLORS = {
    "exact": style.INK,
    "gaussian 0.1": "#c0392b",
    "gaussian 0.1, scheduled": "#0b7a75",
    "gaussian 0.1, a quarter of the rate": "#2f6db5",
}


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return a line for each way, and training loss and rate factor over the steps."""
    figure, (loss, factor) = style.panels(2, (11, 4.4))
    lines = []
    for way in ways(records):
        runs = [record for record in records if record["cell"]["way"] == way]
        results = [run["results"] for run in runs]
        curves = [[number(point["loss"]) for point in each["curves"]["train"]] for each in results]
        length = min(map(len, curves))
        means = [mean(curve[at] for curve in curves) for at in range(length)]
        smooth = [mean(means[max(0, at + 1 - WINDOW) : at + 1]) for at in range(length)]
        steps = [point["step"] for point in results[0]["curves"]["train"]][:length]
        look: dict[str, Any] = {"color": _COLORS.get(way, style.QUIET), "label": way}
        loss.plot(steps, smooth, linewidth=1.4, **look)
        for each in results:
            noted = [point for point in each["noise"].get("curve", ()) if "rate_factor" in point]
            factor.plot(
                [point["step"] for point in noted], [point["rate_factor"] for point in noted], linewidth=0.8, **look
            )
        lines.append(
            [
                way,
                cell([late_loss(run) for run in runs], ".3f"),
                cell([number(each["curves"]["eval"][-1]["loss"]) for each in results], ".3f"),
                cell([score(run) for run in runs]),
                _last_ratio(results),
            ]
        )
    loss.set(xlabel="step", ylabel=f"training loss, mean over {WINDOW} logs")
    factor.set(xlabel="step", ylabel="factor of the learning rate")
    factor.set_ylim(0, 1.05)
    style.legend(figure, loss, 4)
    header = ["training", "training loss, second half", "evaluation loss", "accuracy", "added / SGD's noise"]
    text = (
        f"MiniLM on {TASK}, one epoch of 10,000 sentences, AdamW. Exact training and the unscheduled Gaussian are of "
        f"the grid `glue`. Means with the standard deviation over seeds and their number:\n\n"
        f"{table(header, lines)}\n\n{where_from(records)}\n"
    )
    return text, figure


def _last_ratio(results: list[dict[str, Any]]) -> str:
    """Return the mean noise over the second half of training, or a word if it was not measured."""
    found = [
        point["ratio"]
        for each in results
        for point in each["noise"].get("curve", [])[len(each["noise"].get("curve", [])) // 2 :]
        if point.get("ratio") is not None
    ]
    return f"{mean(found):.1f}" if found else "not measured"


def _needed(labels: dict[str, Any]) -> bool:
    return labels.get("task", TASK) == TASK and labels["way"] in _COLORS


ARTEFACT = Artefact(
    "schedule", "A learning rate from the noise, in a short fine-tuning", ("glue", "schedule"), render, _needed
)

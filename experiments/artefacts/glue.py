"""GLUE score against the ratio: the paper's table 2."""

from __future__ import annotations

from statistics import mean, stdev

from matplotlib.figure import Figure

from . import paper, style
from .artefact import MISSING, Artefact, Record, select, table, ways, where_from
from .names import shown

_NOTE = (
    "Scores are the means of each task's GLUE metrics on its development file at the last step, times 100; "
    "± is the standard deviation over seeds, and the small number how many."
)


def scores(records: list[Record], way: str, task: str) -> list[float]:
    """Return the scores of all seeds."""
    return [100 * record["results"]["score"] for record in select(records, "glue", way=way, task=task)]


def by_seed(records: list[Record], way: str, tasks: list[str]) -> list[float]:
    """Return the mean of all tasks for each seed that has them all."""
    found: dict[int, list[float]] = {}
    for record in select(records, "glue", way=way):
        found.setdefault(record["cell"].get("seed", 0), []).append(100 * record["results"]["score"])
    return [mean(each) for _, each in sorted(found.items()) if len(each) == len(tasks)]


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return the table, what follows from it, and a figure of the mean over the share kept."""
    tasks, names = sorted(ways(records, "task")), _ordered(ways(records))
    lines = [
        [
            shown(way),
            _kept(records, way),
            *(_cell(scores(records, way, task)) for task in tasks),
            _cell(by_seed(records, way, tasks)),
        ]
        for way in names
    ]
    text = table(["training", "kept", *tasks, "mean"], lines) + f"\n\n{_NOTE}\n\n{_verdict(records, tasks)}\n\n"
    text += (
        "Kept is what a step keeps for backward of all that exact training keeps, on the longest batch of each task, "
        "mean over tasks; linear inputs are only a part of that.\n\n"
        "The paper's own averages (RoBERTa-base, ten columns, 10 epochs): "
        + ", ".join(f"{'exact' if ratio is None else f'ρ = {ratio}'} {value}" for ratio, value in paper.AVERAGE.items())
        + f".\n\n{_recipes(records)}\n\n{where_from(records)}\n"
    )
    return text, _figure(records, names, tasks)


def _ordered(names: list[str]) -> list[str]:
    first = ["exact", *sorted((name for name in names if name.startswith("gaussian")), reverse=True)]
    return [name for name in first if name in names] + [name for name in names if name not in first]


def _cell(values: list[float]) -> str:
    if not values:
        return MISSING
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread} <sub>{len(values)}</sub>"


def _kept(records: list[Record], way: str) -> str:
    shares = []
    for record in select(records, "glue", way=way):
        exact = select(records, "glue", way="exact", task=record["cell"]["task"])
        if exact:
            shares.append(record["results"]["memory"]["kept_bytes"] / exact[0]["results"]["memory"]["kept_bytes"])
    return f"{mean(shares):.0%}" if shares else MISSING


def _verdict(records: list[Record], tasks: list[str]) -> str:
    """Return how far ours and the paper's Gaussian are from exact, over the seeds all three have."""
    exact, ours, gaussian = (by_seed(records, way, tasks) for way in ("exact", "recommended 0.1", "gaussian 0.1"))
    seeds = min(len(exact), len(ours), len(gaussian))
    if not seeds:
        return "The comparison at a tenth of the bytes is not complete."
    lost = [a - b for a, b in zip(exact[:seeds], ours[:seeds], strict=True)]
    won = [a - b for a, b in zip(ours[:seeds], gaussian[:seeds], strict=True)]
    return (
        f"At a tenth of the bytes ours loses {mean(lost):.2f} points against exact training and is "
        f"{mean(won):.2f} points above the paper's Gaussian, mean of {len(tasks)} tasks over {seeds} seeds (by seed: "
        f"{', '.join(f'{value:.2f}' for value in lost)} lost; {', '.join(f'{value:.2f}' for value in won)} above)."
    )


def _recipes(records: list[Record]) -> str:
    parts = []
    for task in sorted(ways(records, "task")):
        record = select(records, "glue", task=task)[0]
        recipe, examples = record["settings"]["recipe"], record["results"]["examples"]
        epochs = "1 epoch" if recipe["epochs"] == 1 else f"{recipe['epochs']} epochs"
        parts.append(f"{task} {examples['train']:,} examples, {epochs}, batch {recipe['batch_size']}")
    settings = records[0]["settings"]
    rate = settings["recipe"]["learning_rate"]
    return f"{settings['model']}, learning rate {rate:g}: {'; '.join(parts)}."


def _figure(records: list[Record], names: list[str], tasks: list[str]) -> Figure:
    figure, (axes,) = style.panels(1, (7, 4.2))
    gaussian = []
    for way in names:
        values = by_seed(records, way, tasks)
        if not values:
            continue
        if way == "exact":
            axes.axhline(mean(values), color=style.INK, linestyle="--", linewidth=1)
            axes.annotate(
                "exact",
                (0.99, mean(values)),
                (0, 4),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
            )
            continue
        share = float(way.split()[1])
        if way.startswith("gaussian"):
            gaussian.append((share, mean(values)))
        error = stdev(values) if len(values) > 1 else None
        axes.errorbar(share, mean(values), error, fmt="o", color=style.color(way), capsize=3)
        if not way.startswith("gaussian"):
            label = "ours (rows in 4 bits, padding left out)" if way.startswith("rec") else "rows"
            axes.annotate(label, (share, mean(values)), (9, -4), textcoords="offset points", color=style.color(way))
    if gaussian:
        axes.plot(*zip(*sorted(gaussian), strict=True), color=style.color("gaussian"))
        axes.annotate(
            "the paper's Gaussian",
            sorted(gaussian)[-1],
            (0, -14),
            textcoords="offset points",
            color=style.color("gaussian"),
            ha="right",
        )
    axes.set(xscale="log", xlabel="kept of each linear input", ylabel=f"mean score of {len(tasks)} GLUE tasks")
    axes.set_xticks([0.1, 0.2, 0.5, 0.9], ["10%", "20%", "50%", "90%"])
    axes.minorticks_off()
    return figure


ARTEFACT = Artefact("glue", "GLUE score against the ratio (table 2)", ("glue",), render)

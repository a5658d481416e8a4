"""GLUE score against the ratio: the paper's table 2."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure

from . import paper, style
from .artefact import MISSING, Artefact, Record, select, table, ways, where_from
from .names import ordered, shown
from .scores import by_seed, excess_loss, late_loss, scores

_NOTE = (
    "Scores are the means of each task's GLUE metrics on its development file at the last step, times 100; "
    "± is the standard deviation over seeds, and the small number how many. Kept is what a step keeps for backward of "
    "all that exact training keeps, on the longest batch of each task, mean over tasks; linear inputs are only a part "
    "of that."
)


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return the tables, what follows from them, and a figure of the mean over the share kept."""
    small, large = (select(records, grid) for grid in ("glue", "base"))
    tasks, names = sorted(ways(small, "task")), ordered(ways(small))
    lines = [
        [
            shown(way),
            _kept(small, way),
            *(_cell(scores(small, way, task)) for task in tasks),
            _cell(list(by_seed(small, way, tasks).values())),
        ]
        for way in names
    ]
    theirs = ", ".join(
        f"{'exact' if ratio is None else f'ρ = {ratio}'} {each}" for ratio, each in paper.AVERAGE.items()
    )
    parts = [
        table(["training", "kept", *tasks, "mean"], lines),
        _NOTE,
        _verdict(small, "glue", tasks),
        _without(small, tasks, "WNLI"),
        _losses(small, names, tasks),
        f"The paper's own averages (RoBERTa-base, ten columns, 10 epochs): {theirs}.",
        _recipes(small),
        _larger(large),
        where_from(records),
    ]
    return "\n\n".join(part for part in parts if part) + "\n", _figure(small, names, tasks)


def _cell(values: list[float]) -> str:
    if not values:
        return MISSING
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread} <sub>{len(values)}</sub>"


def _kept(records: list[Record], way: str) -> str:
    shares = []
    for record in records:
        if record["cell"]["way"] != way:
            continue
        exact = select(records, record["grid"], way="exact", task=record["cell"].get("task"))
        if exact:
            shares.append(record["results"]["memory"]["kept_bytes"] / exact[0]["results"]["memory"]["kept_bytes"])
    return f"{mean(shares):.0%}" if shares else MISSING


def _verdict(records: list[Record], grid: str, tasks: list[str], at: str = "At a tenth of the bytes") -> str:
    """Return how far ours is from exact and from the paper's Gaussian, over the seeds all three have."""
    ways_of = ("recommended 0.1", "exact", "gaussian 0.1")
    ours, exact, gaussian = (by_seed(records, way, tasks, grid) for way in ways_of)
    seeds = sorted(ours.keys() & exact.keys() & gaussian.keys())
    if not seeds:
        return "The comparison at a tenth of the bytes is not complete."
    from_exact, from_gaussian = (_points([ours[seed] - other[seed] for seed in seeds]) for other in (exact, gaussian))
    return (
        f"{at}, {f'mean of {len(tasks)} tasks' if len(tasks) > 1 else tasks[0]} over "
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}: "
        f"ours − exact {from_exact}, ours − the paper's Gaussian {from_gaussian}."
    )


def _without(records: list[Record], tasks: list[str], task: str) -> str:
    """Return the same without a task whose few examples decide little."""
    runs, others = select(records, "glue", task=task), [other for other in tasks if other != task]
    if not runs or not others:
        return ""
    rest = [record for record in records if record not in runs]
    at = f"Without {task}, which is evaluated on {runs[0]['results']['examples']['eval']} examples"
    return _verdict(rest, "glue", others, at)


def _points(gaps: list[float]) -> str:
    """Return the mean difference with its standard error, and the differences by seed."""
    error = f" ± {stdev(gaps) / len(gaps) ** 0.5:.2f}" if len(gaps) > 1 else ""
    return f"**{mean(gaps):+.2f}**{error} points (by seed {', '.join(f'{gap:+.2f}' for gap in gaps)})"


def _losses(records: list[Record], names: list[str], tasks: list[str]) -> str:
    """Return how far training has come: the same examples in the same order, so far less noisy than a score."""
    lines = []
    for way in names[1:]:
        by_task = [excess_loss(records, way, task) for task in tasks]
        cells = [MISSING if excess is None else f"{excess:+.1%}" for excess in by_task]
        known = [excess for excess in by_task if excess is not None]
        lines.append([shown(way), *cells, f"{mean(known):+.1%}" if len(known) == len(tasks) else MISSING])
    return (
        "Training loss over the second half of training against that of exact training with the same seed, mean over "
        f"seeds:\n\n{table(['training', *tasks, 'mean'], lines)}"
    )


def _larger(records: list[Record]) -> str:
    """Return what an encoder of the paper's size reached on one task."""
    if not records:
        return ""
    lines = []
    for way in ordered(ways(records)):
        runs = select(records, "base", way=way)
        lines.append(
            [
                shown(way),
                _kept(records, way),
                f"{mean(map(late_loss, runs)):.3f}",
                f"{mean(run['results']['curves']['eval'][-1]['loss'] for run in runs):.3f}",
                _cell([100 * run["results"]["score"] for run in runs]),
            ]
        )
    settings, examples = records[0]["settings"], records[0]["results"]["examples"]["train"]
    recipe = settings["recipe"]
    return (
        f"An encoder of RoBERTa-base's shapes ({settings['model']}) on {settings['task']}: {examples:,} examples, "
        f"{_epochs(recipe)}, batch {recipe['batch_size']}, learning rate {recipe['learning_rate']:g}; the "
        "training loss is that of the second half:\n\n"
        + table(["training", "kept", "training loss", "evaluation loss", "score"], lines)
        + f"\n\n{_verdict(records, 'base', [settings['task']])}"
    )


def _epochs(recipe: dict[str, Any]) -> str:
    return "1 epoch" if recipe["epochs"] == 1 else f"{recipe['epochs']} epochs"


def _recipes(records: list[Record]) -> str:
    parts = []
    for task in sorted(ways(records, "task")):
        record = select(records, "glue", task=task)[0]
        recipe, examples = record["settings"]["recipe"], record["results"]["examples"]
        parts.append(f"{task} {examples['train']:,} examples, {_epochs(recipe)}, batch {recipe['batch_size']}")
    settings = records[0]["settings"]
    rate = settings["recipe"]["learning_rate"]
    return f"{settings['model']}, learning rate {rate:g}: {'; '.join(parts)}."


def _figure(records: list[Record], names: list[str], tasks: list[str]) -> Figure:
    figure, (axes,) = style.panels(1, (7, 4.6))
    families: dict[str, list[tuple[float, list[float]]]] = {}
    for way in names:
        values = list(by_seed(records, way, tasks).values())
        if values and way == "exact":
            axes.axhline(mean(values), color=style.INK, linestyle="--", linewidth=1, label="exact")
        elif values:
            kind, share = way.split()
            families.setdefault(kind, []).append((float(share), values))
    for kind, points in families.items():
        label, marker, shift = _LOOKS[kind]
        axes.errorbar(
            [share * shift for share, _ in sorted(points)],
            [mean(values) for _, values in sorted(points)],
            [stdev(values) if len(values) > 1 else 0 for _, values in sorted(points)],
            fmt=f"{marker}-" if len(points) > 1 else marker,
            color=style.color(kind),
            capsize=3,
            label=label,
        )
    axes.set(xscale="log", xlim=(0.083, 1), xlabel="kept of each linear input")
    axes.set_ylabel(f"mean score of {len(tasks)} GLUE tasks")
    axes.set_xticks([0.1, 0.2, 0.5, 0.9], ["10%", "20%", "50%", "90%"])
    axes.minorticks_off()
    style.legend(figure, axes, 2)
    return figure


# Points of one share stand side by side, to the left of the Gaussian's line.
_LOOKS = {
    "gaussian": ("the paper's Gaussian", "o", 1.0),
    "recommended": ("ours (rows in 4 bits, padding left out)", "D", 0.95),
    "rows": ("rows", "s", 0.9),
}


ARTEFACT = Artefact("glue", "GLUE score against the ratio (table 2)", ("glue", "base"), render)

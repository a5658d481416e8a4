"""GLUE score against the ratio: the paper's table 2."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure

from . import paper, style
from .artefact import MISSING, Artefact, Record, select, table, ways, where_from
from .names import ordered, shown
from .scores import by_seed, cell, excess_loss, gaps, interval, late_loss, number, score, scores

_NOTE = (
    "Scores are the means of each task's GLUE metrics on its development file at the last step, times 100; "
    "± is the standard deviation over seeds, and the small number counts the seeds. Kept is what a step keeps for "
    "backward, relative to exact training, on the longest batch of each task, mean over tasks; linear inputs are only "
    "a part of it. In the figure, differences from exact training with the same seeds: bars are standard errors, "
    "hollow marks one seed."
)


def render(records: list[Record]) -> tuple[str, Figure | None]:
    """Return the tables, what follows from them, and a figure of the mean over the share kept."""
    small, large = (select(records, grid) for grid in ("glue", "base"))
    tasks, names = sorted(ways(small, "task")), ordered(ways(small))
    lines = [
        [
            shown(way),
            _kept(small, way),
            *(cell(scores(small, way, task)) for task in tasks),
            cell(list(by_seed(small, way, tasks).values())),
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
        f"The paper's own averages: {theirs}. They are of RoBERTa-base, ten columns and 10 epochs, and its published "
        "scripts take the best evaluation of a run by one metric a task; ours are the last, by all its metrics.",
        _recipes(small),
        _larger(large),
        where_from(records),
    ]
    return "\n\n".join(part for part in parts if part) + "\n", _figure(small, names, tasks)


def _kept(records: list[Record], way: str) -> str:
    shares = {}  # of a task, in which all runs keep the same
    for record in records:
        task = record["cell"].get("task")
        exact = select(records, record["grid"], way="exact", task=task)
        if record["cell"]["way"] == way and exact:
            shares[task] = record["results"]["memory"]["kept_bytes"] / exact[0]["results"]["memory"]["kept_bytes"]
    return f"{mean(shares.values()):.0%}" if shares else MISSING


def _verdict(records: list[Record], grid: str, tasks: list[str], at: str = "At a tenth of the bytes") -> str:
    """Return how far ours is from exact and from the paper's Gaussian, over the seeds all three have."""
    ways_of = ("recommended 0.1", "exact", "gaussian 0.1")
    ours, exact, gaussian = (by_seed(records, way, tasks, grid) for way in ways_of)
    seeds = sorted(ours.keys() & exact.keys() & gaussian.keys())
    if not seeds:
        return "The comparison at a tenth of the bytes is not complete."
    of_all = {seed: ours[seed] for seed in seeds}
    from_exact, from_gaussian = (_points(gaps(of_all, other)) for other in (exact, gaussian))
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
    if max(map(score, runs)) < _COMMONER[task]:
        at += f" and where no run reaches the {_COMMONER[task]} that the commoner label alone would get"
    return _verdict(rest, "glue", others, at)


def _points(found: list[float]) -> str:
    """Return the mean difference with its interval, and the differences by seed."""
    sure = "{:+.1f} to {:+.1f} with 95% confidence; ".format(*interval(found)) if len(found) > 1 else ""
    return f"**{mean(found):+.2f}** points ({sure}by seed {', '.join(f'{gap:+.2f}' for gap in found)})"


def _losses(records: list[Record], names: list[str], tasks: list[str]) -> str:
    """Return how far training has come: the same examples in the same order."""
    lines = []
    for way in names[1:]:
        by_task = [[100 * excess for excess in excess_loss(records, way, task)] for task in tasks]
        complete = mean(map(mean, by_task)) if all(by_task) else None
        lines.append(
            [
                shown(way),
                *(cell(excess, "+.1f") for excess in by_task),
                MISSING if complete is None else f"{complete:+.1f}",
            ]
        )
    return (
        "Training loss over the second half of training above that of exact training with the same seed, in per cent:"
        f"\n\n{table(['training', *tasks, 'mean'], lines)}"
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
                cell([late_loss(run) for run in runs], ".3f"),
                cell([number(run["results"]["curves"]["eval"][-1]["loss"]) for run in runs], ".3f"),
                cell([score(run) for run in runs]),
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
    """Draw the differences from exact training with the same seeds: scores themselves vary more from seed to seed."""
    figure, (axes,) = style.panels(1, (7, 4.6))
    exact = by_seed(records, "exact", tasks)
    axes.axhline(0, color=style.INK, linestyle="--", linewidth=1, label="exact")
    families: dict[str, list[tuple[float, list[float]]]] = {}
    for way in names[1:]:
        kind, said = way.split()
        if found := gaps(by_seed(records, way, tasks), exact):
            families.setdefault(kind, []).append((float(said), found))
    for kind, points in families.items():
        label, marker, shift = _LOOKS[kind]
        for share, found in sorted(points):
            several = len(found) > 1
            axes.errorbar(
                share * shift,
                mean(found),
                stdev(found) / len(found) ** 0.5 if several else None,
                fmt=marker,
                markersize=7,
                color=style.color(kind),
                markerfacecolor=style.color(kind) if several else "white",
                capsize=3,
                label=None if (share, found) != min(points) else label,
            )
    theirs = [(ratio, score - paper.AVERAGE[None]) for ratio, score in paper.AVERAGE.items() if ratio is not None]
    look: dict[str, Any] = {"color": style.QUIET, "linestyle": ":", "marker": "x", "markersize": 5}
    axes.plot(*zip(*sorted(theirs), strict=True), label="in the paper (ten columns)", **look)
    axes.set(xscale="log", xlim=(0.083, 1), xlabel="kept of each linear input")
    axes.set_ylabel(f"mean score of {len(tasks)} tasks, minus exact's")
    axes.set_xticks([0.1, 0.2, 0.5, 0.9], ["10%", "20%", "50%", "90%"])
    axes.minorticks_off()
    style.legend(figure, axes, 3)
    return figure


_COMMONER = {"WNLI": 56.3}  # 40 of 71


# Points of one share stand side by side, to the left of the Gaussian's.
_LOOKS = {
    "gaussian": ("the paper's Gaussian", "o", 1.0),
    "recommended": ("ours (rows in 4 bits, padding left out)", "D", 0.95),
    "rows": ("rows", "s", 0.9),
}


ARTEFACT = Artefact("glue", "GLUE score against the ratio (table 2)", ("glue", "base"), render)

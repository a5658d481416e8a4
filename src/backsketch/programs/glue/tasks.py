"""Task: what a GLUE task's files hold, how it is scored, and the batch and learning rate it is trained with."""

from __future__ import annotations

import re
from dataclasses import dataclass

ACCURACY, F1, MATTHEWS, PEARSON, SPEARMAN = "accuracy", "f1", "matthews", "pearson", "spearman"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A column of the paper's GLUE table; MNLI is two of them.

    Attributes:
        name: as GLUE writes it.
        folder: the directory of its files.
        texts: the columns of its one or two sentences, by the name in the header, or by position without a header.
        label: the column of the label, likewise.
        labels: the labels in the order of their numbers; none means a score to regress on.
        metrics: GLUE's metrics for it; their mean over its development files is the task's score.
        hub: its name in the hub's ``nyu-mll/glue``.
        train: its training file.
        dev: its development files; most tasks have one.
        parts: what a metric's name gets at its end for each of them.
        hub_texts: the columns of its sentences on the hub.
        hub_dev: its development splits on the hub.
        columns: how many columns a file without a header has.
        short_rows: whether the published files have rows that break off, to be left out and counted.
        batch_size, learning_rate: the paper's.
    """

    name: str
    folder: str
    texts: tuple[str, ...] | tuple[int, ...]
    label: str | int
    labels: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = (ACCURACY,)
    hub: str
    hub_texts: tuple[str, ...] = ("sentence1", "sentence2")
    hub_dev: tuple[str, ...] = ("validation",)
    train: str = "train.tsv"
    dev: tuple[str, ...] = ("dev.tsv",)
    parts: tuple[str, ...] = ("",)
    columns: int | None = None
    short_rows: bool = False
    batch_size: int = 16
    learning_rate: float = 1e-5

    @property
    def regression(self) -> bool:
        """Tell whether the label is a number, not a class."""
        return not self.labels

    @property
    def all_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics on all development files."""
        return tuple(name + part for part in self.parts for name in self.metrics)

    @property
    def outputs(self) -> int:
        """Return how many outputs a model for the task has."""
        return max(1, len(self.labels))


ENTAILMENT = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2")


def _mnli(name: str, *genres: str) -> Task:
    return Task(
        name=name,
        folder="MNLI",
        texts=PAIR,
        label="gold_label",
        labels=("entailment", "neutral", "contradiction"),
        hub="mnli",
        hub_texts=("premise", "hypothesis"),
        hub_dev=tuple(f"validation_{genre}" for genre in genres),
        dev=tuple(f"dev_{genre}.tsv" for genre in genres),
        parts=("", "_mismatched")[: len(genres)],
    )


TASKS = {
    task.name.lower(): task
    for task in (
        Task(
            name="CoLA",
            folder="CoLA",
            texts=(3,),
            label=1,
            columns=4,
            metrics=(MATTHEWS,),
            hub="cola",
            hub_texts=("sentence",),
        ),
        _mnli("MNLI", "matched", "mismatched"),
        _mnli("MNLI-matched", "matched"),
        _mnli("MNLI-mismatched", "mismatched"),
        Task(
            name="MRPC",
            folder="MRPC",
            texts=("#1 String", "#2 String"),
            label="Quality",
            metrics=(ACCURACY, F1),
            hub="mrpc",
        ),
        Task(
            name="QNLI",
            folder="QNLI",
            texts=("question", "sentence"),
            label="label",
            labels=ENTAILMENT,
            hub="qnli",
            hub_texts=("question", "sentence"),
        ),
        Task(
            name="QQP",
            folder="QQP",
            texts=("question1", "question2"),
            label="is_duplicate",
            metrics=(ACCURACY, F1),
            hub="qqp",
            hub_texts=("question1", "question2"),
            short_rows=True,
            batch_size=32,
        ),
        Task(name="RTE", folder="RTE", texts=PAIR, label="label", labels=ENTAILMENT, hub="rte", learning_rate=2e-5),
        Task(
            name="SST-2",
            folder="SST-2",
            texts=("sentence",),
            label="label",
            hub="sst2",
            hub_texts=("sentence",),
            batch_size=32,
            learning_rate=2e-5,
        ),
        Task(
            name="STS-B", folder="STS-B", texts=PAIR, label="score", labels=(), metrics=(PEARSON, SPEARMAN), hub="stsb"
        ),
        Task(name="WNLI", folder="WNLI", texts=PAIR, label="label", hub="wnli", batch_size=32),
    )
}

_ALIASES = {"mnlim": "mnli-matched", "mnlimm": "mnli-mismatched"}


def find_task(name: str) -> Task:
    """Return the task of this name, however it is capitalised or hyphenated; ``mnli`` alone has both dev files."""
    plain = _plain(name)
    plain = _plain(_ALIASES.get(plain, plain))
    for task in TASKS.values():
        if _plain(task.name) == plain:
            return task
    raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")


def _plain(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower())

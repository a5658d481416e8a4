"""Read GLUE from its files or from the hub; mistakes are reported before anything else is loaded."""

from __future__ import annotations

import csv
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tasks import Task

HUB = "nyu-mll/glue"


@dataclass(frozen=True, slots=True)
class Examples:
    """The sentences of a file and their labels, and how many broken rows were left out."""

    texts: list[tuple[str, ...]]
    labels: list[int] | list[float]
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.texts)

    def subset(self, rows: int | None) -> Examples:
        """Return a fixed choice of ``rows`` examples, the same in every run; all of them for None."""
        if rows is None or rows >= len(self):
            return self
        chosen = sorted(random.Random(0).sample(range(len(self)), rows))
        return Examples([self.texts[i] for i in chosen], [self.labels[i] for i in chosen], self.skipped)


def read_task(task: Task, data: Path | None) -> list[Examples]:
    """Return the examples of training and of each development file, from GLUE's files in ``data`` or from the hub."""
    if data is None:
        return [_from_hub(task, split) for split in ("train", *task.hub_dev)]
    return [read_file(task, path) for path in task_files(task, data)]


def task_files(task: Task, data: Path, names: Sequence[str] | None = None) -> list[Path]:
    """Return a task's files in ``data``, by default those of training and development; one that is missing is named."""
    paths = [data / task.folder / name for name in names or (task.train, *task.dev)]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise ValueError(
            f"{task.name}: no file {' and no file '.join(missing)}; data must be a directory of GLUE files"
        )
    return paths


def read_file(task: Task, path: Path) -> Examples:
    """Return the examples of one tab-separated file of a task."""
    texts, labels, skipped = [], [], 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            width, text_at, label_at = _columns(task, path, rows)
            for row in rows:
                if len(row) != width:
                    if task.short_rows and len(row) < width:
                        skipped += 1
                        continue
                    raise ValueError(f"{path}, line {rows.line_num}: {width} columns expected, got {len(row)}")
                texts.append(tuple(row[at] for at in text_at))
                labels.append(_label(task, row[label_at], f"{path}, line {rows.line_num}"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from error
    if not texts:
        raise ValueError(f"{path}: no examples in it")
    return Examples(texts, labels, skipped)


def _columns(task: Task, path: Path, rows: Iterator[list[str]]) -> tuple[int, list[int], int]:
    """Return how many columns there are, which of them are the sentences, and which is the label."""
    wanted = [*task.texts, task.label]
    if task.columns is not None:
        *text_at, label_at = (int(column) for column in wanted)
        return task.columns, text_at, label_at
    header = next(rows, [])
    absent = [str(column) for column in wanted if column not in header]
    if absent:
        found = ", ".join(header) or "nothing"
        raise ValueError(f"{path}, line 1: no column {', '.join(map(repr, absent))} in the header, which has {found}")
    *text_at, label_at = (header.index(str(column)) for column in wanted)
    return len(header), text_at, label_at


def _label(task: Task, text: str, where: str) -> Any:
    if not task.regression:
        if text not in task.labels:
            raise ValueError(f"{where}: {task.name} has labels {', '.join(task.labels)}, got {text!r}")
        return task.labels.index(text)
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not 0 <= score <= 5:
        raise ValueError(f"{where}: {task.name} has a number from 0 to 5 as its label, got {text!r}")
    return score


def _from_hub(task: Task, split: str) -> Examples:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ValueError(
            "reading GLUE from the hub needs datasets: pip install 'backsketch[transformers]', or give data"
        ) from error
    try:
        rows = load_dataset(HUB, task.hub, split=split)
    except Exception as error:  # whatever the hub client raises, the user's way out is the same
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{task.name} could not be read from the hub ({reason}); data can name local files") from error
    texts = [tuple(row) for row in zip(*(rows[column] for column in task.hub_texts), strict=True)]
    kind = float if task.regression else int
    return Examples(texts, [kind(label) for label in rows["label"]])


csv.field_size_limit(sys.maxsize)

"""GLUE's metrics: Matthews correlation, accuracy and F1, Pearson and Spearman."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from .tasks import ACCURACY, F1, MATTHEWS, PEARSON, SPEARMAN, Task


def evaluate(task: Task, outputs: Any, labels: Any, sizes: Sequence[int] | None = None) -> dict[str, float]:
    """Return the task's metrics, and ``score``, their mean, as GLUE has it: (examples, outputs) -> one float a metric.

    A correlation with something constant is undefined; it counts as 0, as a useless prediction should. Where an output
    is not finite, training has diverged and all of them are nan.

    Args:
        sizes: how many examples are of each development file, where the task has several.
    """
    predicted = outputs.reshape(len(labels), -1)
    if not np.isfinite(predicted).all():
        return dict.fromkeys((*task.all_metrics, "score"), math.nan)
    predicted = predicted[:, 0] if task.regression else predicted.argmax(axis=1)
    sizes = [len(labels)] if sizes is None else sizes
    if len(sizes) != len(task.parts):
        raise ValueError(f"sizes must have a number for each dev file of {task.name}, {len(task.parts)}, got {sizes}")
    values: dict[str, float] = {}
    begin = 0
    for part, size in zip(task.parts, sizes, strict=True):
        end = begin + size
        values |= {name + part: _METRICS[name](labels[begin:end], predicted[begin:end]) for name in task.metrics}
        begin = end
    return {**values, "score": sum(values.values()) / len(values)}


def _accuracy(labels: Any, predicted: Any) -> float:
    return float(accuracy_score(labels, predicted))


def _f1(labels: Any, predicted: Any) -> float:
    return float(f1_score(labels, predicted, zero_division=0))


def _matthews(labels: Any, predicted: Any) -> float:
    return float(matthews_corrcoef(labels, predicted))


def _pearson(labels: Any, predicted: Any) -> float:
    return _defined(pearsonr, labels, predicted)


def _spearman(labels: Any, predicted: Any) -> float:
    return _defined(spearmanr, labels, predicted)


def _defined(correlation: Any, labels: Any, predicted: Any) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a constant input is answered with 0
        value = float(correlation(labels, predicted).statistic)
    return 0.0 if math.isnan(value) else value


_METRICS = {ACCURACY: _accuracy, F1: _f1, MATTHEWS: _matthews, PEARSON: _pearson, SPEARMAN: _spearman}

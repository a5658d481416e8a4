"""GLUE's metrics against values worked out by hand."""

import math

import numpy as np
import pytest

from backsketch.programs.glue.metrics import evaluate
from backsketch.programs.glue.tasks import TASKS, find_task

LABELS = np.array([1, 1, 1, 0, 0, 1, 0, 0])
PREDICTED = np.array([1, 1, 0, 0, 1, 1, 1, 0])  # 3 of 5 ones are right, 2 of 3 zeros


def logits(predicted):
    return np.eye(2)[predicted] * 3 - 1


def test_matthews_correlation():
    expected = (3 * 2 - 2 * 1) / math.sqrt((3 + 2) * (3 + 1) * (2 + 2) * (2 + 1))
    found = evaluate(find_task("cola"), logits(PREDICTED), LABELS)
    assert found == pytest.approx({"matthews": expected, "score": expected})


def test_accuracy_and_f1_and_their_mean():
    f1 = 2 * 3 / (2 * 3 + 2 + 1)
    found = evaluate(find_task("mrpc"), logits(PREDICTED), LABELS)
    assert found == pytest.approx({"accuracy": 5 / 8, "f1": f1, "score": (5 / 8 + f1) / 2})


def test_pearson_and_spearman():
    labels, outputs = np.array([1.0, 2.0, 3.0, 4.0]), np.array([[1.0], [3.0], [2.0], [10.0]])
    pearson = 13 / math.sqrt(5 * 50)  # deviations (-1.5, -.5, .5, 1.5) and (-3, -1, -2, 6)
    spearman = 1 - 6 * 2 / (4 * 15)
    found = evaluate(find_task("sts-b"), outputs, labels)
    assert found == pytest.approx({"pearson": pearson, "spearman": spearman, "score": (pearson + spearman) / 2})


def test_three_classes():
    outputs = np.array([[0.1, 0.2, 0.9], [5, 1, 1], [0, 1, 0]])
    assert evaluate(find_task("mnli-mm"), outputs, np.array([2, 0, 0]))["accuracy"] == pytest.approx(2 / 3)


def test_both_files_of_mnli_count_alike():
    outputs = np.eye(3)[[0, 1, 2, 0, 0]]
    found = evaluate(find_task("mnli"), outputs, np.array([0, 1, 2, 0, 1]), [1, 4])
    assert found == pytest.approx({"accuracy": 1.0, "accuracy_mismatched": 0.75, "score": 0.875})
    with pytest.raises(ValueError, match="sizes must have a number for each dev file of MNLI, 2, got"):
        evaluate(find_task("mnli"), outputs, np.array([0, 1, 2, 0, 1]))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_constant_prediction_has_a_score(task):
    labels = np.array([0.5, 1.0, 3.0]) if task.regression else np.array([0, 1, 1])
    sizes = [3] if len(task.dev) == 1 else [1, 2]
    found = evaluate(task, np.zeros((3, task.outputs)), labels, sizes)
    assert set(found) == {*task.all_metrics, "score"}
    assert all(math.isfinite(value) for value in found.values())

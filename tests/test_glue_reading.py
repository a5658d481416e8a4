"""GLUE's tasks and files: every layout is read, and every mistake is named with its file and line."""

import pytest

from backsketch.programs.glue.reading import Examples, read_file, read_task
from backsketch.programs.glue.tasks import TASKS, find_task
from glue_files import make_row, write_task


def test_there_are_the_ten_columns_of_the_papers_table():
    assert [task.name for task in TASKS.values() if len(task.dev) == 1] == [
        "CoLA", "MNLI-matched", "MNLI-mismatched", "MRPC", "QNLI", "QQP", "RTE", "SST-2", "STS-B", "WNLI",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "name"),
    [("cola", "CoLA"), ("SST2", "SST-2"), ("sst_2", "SST-2"), ("stsb", "STS-B"), ("MNLI", "MNLI"),
     ("mnli-mm", "MNLI-mismatched"), ("MNLI_mismatched", "MNLI-mismatched")],
)  # fmt: skip
def test_a_task_is_found_however_it_is_written(given, name):
    assert find_task(given).name == name


def test_an_unknown_task_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"task must be one of cola, .*wnli, got 'colour'"):
        find_task("colour")


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_tasks_files_are_read_as_they_are(task, tmp_path):
    written = write_task(tmp_path, task)
    train, *devs = read_task(task, tmp_path)
    assert len(devs) == len(task.parts) == len(task.hub_dev)
    for examples, rows in zip([train, *devs], written, strict=True):
        assert len(examples) == len(rows)
        assert examples.skipped == 0
        for text, label, row in zip(examples.texts, examples.labels, rows, strict=True):
            assert len(text) == len(task.texts)
            assert all(sentence in row for sentence in text)
            assert label == float(row[-1]) if task.regression else task.labels[label] in row

    assert [text.split()[0] for text in train.texts[0]] == ["red"] * len(task.texts)


def test_quotes_are_letters_like_any_other(tmp_path):
    path = tmp_path / "dev.tsv"
    path.write_text('x\t1\t\t"one open quote\ny\t0\t\tand " another\n')
    examples = read_file(find_task("cola"), path)
    assert examples.texts == [('"one open quote',), ('and " another',)]
    assert examples.labels == [1, 0]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_byte_order_mark_belongs_to_no_column(task, tmp_path):
    write_task(tmp_path, task)
    plain = read_task(task, tmp_path)
    for name in (task.train, *task.dev):
        path = tmp_path / task.folder / name
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_task(task, tmp_path) == plain


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"RTE: no file .*RTE.train.tsv and no file .*RTE.dev.tsv"):
        read_task(find_task("rte"), tmp_path)


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("rte", "index\tsentence1\tlabel\n", r"line 1: no column 'sentence2' in the header, which has index, sent"),
        ("rte", "", r"no column 'sentence1', 'sentence2', 'label' in the header, which has nothing"),
        ("sst-2", "sentence\tlabel\ngood\t1\nbad\t2\n", r"dev.tsv, line 3: SST-2 has labels 0, 1, got '2'"),
        ("sst-2", "sentence\tlabel\n", r"no examples in it"),
        ("sst-2", "sentence\tlabel\ngood\n", r"line 2: 2 columns expected, got 1"),
        ("cola", "a\t1\tx\n", r"line 1: 4 columns expected, got 3"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\tmuch\n", r"line 2: STS-B has a number from 0 to 5 .*, got 'much'"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan\n", r"line 2: STS-B has a number from 0 to 5 .*, got 'nan'"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\t5.2\n", r"line 2: STS-B has a number from 0 to 5 .*, got '5.2'"),
    ],
)
def test_a_mistake_in_a_file_is_named(task, text, message, tmp_path):
    (tmp_path / "dev.tsv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_file(find_task(task), tmp_path / "dev.tsv")


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "dev.tsv").write_bytes(b"x\t1\t\t\xff\xfe\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_file(find_task("cola"), tmp_path / "dev.tsv")


def test_rows_of_qqp_that_break_off_are_counted(tmp_path):
    task = find_task("qqp")
    write_task(tmp_path, task, rows=5)
    path = tmp_path / "QQP" / "train.tsv"
    path.write_text(path.read_text() + "7\t1\t2\tbroken\n" + "\t".join(make_row(task, 9)) + "\n")
    examples = read_file(task, path)
    assert (len(examples), examples.skipped) == (6, 1)


def test_a_subset_is_always_the_same():
    examples = Examples([(str(i),) for i in range(100)], list(range(100)))
    subset = examples.subset(10)
    assert subset == examples.subset(10)
    assert len(set(subset.labels)) == 10
    assert [text for (text,) in subset.texts] == [str(label) for label in subset.labels]
    assert examples.subset(None) is examples.subset(1000) is examples

"""Tiny files in GLUE's layouts, of made-up words: what the tests of GLUE share."""

import random

WORDS = ("red", "blue", "bird", "tree", "runs", "sleeps", "the", "a", "green", "slow", '"quoted', "fish")
PARSES = ("sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse", "sentence2_parse")
SOURCES = ("genre", "filename", "year", "old_index", "source1", "source2")
HEADERS = {
    "MNLI": ["index", "promptID", "pairID", "genre", *PARSES, "sentence1", "sentence2", "label1", "gold_label"],
    "MRPC": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "QNLI": ["index", "question", "sentence", "label"],
    "QQP": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "RTE": ["index", "sentence1", "sentence2", "label"],
    "SST-2": ["sentence", "label"],
    "STS-B": ["index", *SOURCES, "sentence1", "sentence2", "score"],
    "WNLI": ["index", "sentence1", "sentence2", "label"],
}


def write_task(root, task, rows=24, dev_rows=12):
    """Write the training and development files of a task and return the rows written, as lists of columns."""
    folder = root / task.folder
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, count in ((task.train, rows), *((dev, dev_rows) for dev in task.dev)):
        lines = [make_row(task, index) for index in range(count)]
        header = [HEADERS[task.folder]] if task.columns is None else []
        (folder / name).write_text("".join("\t".join(line) + "\n" for line in header + lines), encoding="utf-8")
        written.append(lines)
    return written


def make_row(task, index):
    """Return one row of made-up sentences; its label is easy to learn from its first word."""
    draw = random.Random(index)
    names = HEADERS[task.folder] if task.columns is None else range(task.columns)
    label = str(draw.randrange(51) / 10) if task.regression else task.labels[index % len(task.labels)]
    row = ["" for _ in names]
    for column in task.texts:
        words = [WORDS[index % max(2, len(task.labels))], *(draw.choice(WORDS) for _ in range(draw.randrange(2, 9)))]
        row[list(names).index(column)] = " ".join(words)
    row[list(names).index(task.label)] = label
    return row

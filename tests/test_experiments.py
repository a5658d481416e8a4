"""Experiments: a grid's cells are what its file says, and only those without a record run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import complexity
import pytest
import torch
import typer
from cells import config_of, settings_of
from filelock import FileLock
from grid import Cell, read_grid
from measures import MEASURES, Places
from run import check_cells, check_records
from torch import nn

from backsketch import SketchConfig
from backsketch.programs.glue.tasks import find_task
from backsketch.programs.result_files import write_json
from glue_files import write_task
from tiny_bert import save_tiny_bert

EXPERIMENTS = Path(__file__).parents[1] / "experiments"

GRID = """
measure = "finetune"

[all]
model = "model"
task = "CoLA"
batch_size = 8
learning_rate = 1e-2
epochs = 1
noise_every = 0

[axes.task.CoLA]

[axes.task.MRPC]
task = "MRPC"
epochs = 2

[axes.way.exact]
exact = true
seed = [0, 1]

[axes.way."rows 0.5"]
ratio = 0.5
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiments")
    for name in ("CoLA", "MRPC"):
        write_task(folder, find_task(name))
    save_tiny_bert(folder / "model")
    (folder / "tiny.toml").write_text(GRID)
    return folder


def test_cells_are_all_combinations_with_the_first_seed_first(place):
    cells = read_grid(place / "tiny.toml")
    assert [cell.name for cell in cells] == [
        "tiny/cola-exact-seed-0",
        "tiny/cola-rows-0.5",
        "tiny/mrpc-exact-seed-0",
        "tiny/mrpc-rows-0.5",
        "tiny/cola-exact-seed-1",
        "tiny/mrpc-exact-seed-1",
    ]
    assert cells[3].labels == {"task": "MRPC", "way": "rows 0.5"}
    settings = settings_of(cells[3].values, place, place)
    assert (settings.task, settings.recipe.epochs, settings.recipe.learning_rate) == ("MRPC", 2, 1e-2)
    assert settings.config == SketchConfig(ratio=0.5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("axes = {}", "must name a measure"),
        ('measure = "finetune"\nextra = 1', "may have measure, all and axes, got extra"),
    ],
)
def test_a_wrong_grid_is_refused(tmp_path, text, complaint):
    (tmp_path / "grid.toml").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_grid(tmp_path / "grid.toml")


def test_a_cell_has_one_sketch():
    assert config_of({"exact": True}) is None
    assert str(config_of({"recommended": 0.1})) == "rows, ratio=0.7111, bits=4"  # as the records have it
    for wrong in ({}, {"exact": True, "ratio": 0.1}):
        with pytest.raises(ValueError, match="one of exact, recommended"):
            config_of(wrong)
    with pytest.raises(ValueError, match="cannot have epoch"):
        settings_of({"task": "CoLA", "exact": True, "epoch": 1}, Path(), Path())


@pytest.mark.parametrize("path", sorted((EXPERIMENTS / "grids").glob("*.toml")), ids=lambda path: path.stem)
def test_committed_grids_say_what_can_run(path):
    cells = read_grid(path)
    assert cells
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        assert cell.measure in MEASURES
        if cell.measure in ("quadratic", "noise_limit"):  # which sketch in one way
            continue
        ways = cell.values["ways"].values() if cell.measure == "throughput" else [cell.values]
        for way in ways:
            config_of(way)


@pytest.mark.parametrize("path", sorted((EXPERIMENTS / "grids").glob("*.toml")), ids=lambda path: path.stem)
def test_committed_records_are_there_and_were_made_from_their_cells(path):
    cells, records = read_grid(path), EXPERIMENTS / "records"
    assert [cell.name for cell in cells if not (records / f"{cell.name}.json").is_file()] == []
    check_records(cells, records)


def test_there_are_committed_grids():
    assert {path.stem for path in (EXPERIMENTS / "records").iterdir() if path.is_dir()} == {
        path.stem for path in (EXPERIMENTS / "grids").glob("*.toml")
    }


@pytest.mark.parametrize("change", [("ratio = 0.5", "ratio = 0.25"), ("epochs = 1", "epochs = 3")])
def test_a_record_of_another_cell_is_refused(change, place, tmp_path):
    (tmp_path / "tiny.toml").write_text(GRID.replace(*change))
    old, new = ({cell.name: cell for cell in read_grid(each / "tiny.toml")} for each in (place, tmp_path))
    for name, cell in old.items():
        settings = json.loads(json.dumps(settings_of(cell.values, place, place).describe()))
        write_json(tmp_path / "records" / f"{name}.json", {"settings": settings})
    check_records(list(old.values()), tmp_path / "records")
    with pytest.raises(typer.BadParameter, match=rf"tiny/.*: its record has another {change[0].split()[0]}; delete"):
        check_records(list(new.values()), tmp_path / "records")


def test_the_papers_gaussian_sketches_padded_rows_in_every_grid_with_padding():
    cells = [cell for path in (EXPERIMENTS / "grids").glob("*.toml") for cell in read_grid(path)]
    padded = [
        cell for cell in cells if cell.measure in ("finetune", "memory") and cell.values.get("kind") == "gaussian"
    ]
    assert padded
    assert all(cell.values.get("ignore_mask") for cell in padded)


def test_memory_is_measured_as_the_cell_says(place):
    def kept(**values):
        given = {"task": "CoLA", "model": "model", "batch_size": 8, "ratio": 0.5, **values}
        return MEASURES["memory"].run(given, Places(place, place, place / "work"))["results"]["kept_bytes"]

    assert kept(ignore_mask=True) < kept()


TIMED = {"model": "model", "batch_size": 3, "length": 3, "rounds": 1, "threads": 1, "ways": {"exact": {"exact": True}}}


def run(place, *arguments, grid="tiny"):
    command = [sys.executable, str(EXPERIMENTS / "run.py"), str(place / f"{grid}.toml"), "--weights", str(place)]
    command += ["--data", str(place), "--records", str(place / "records"), "--work", str(place / "work"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def said(run):
    """Return what was said, without the frame and its line breaks."""
    return " ".join(run.stderr.replace("│", " ").split())


def test_only_what_has_no_record_runs(place):
    only = ("--only", "*cola-exact-seed-0")
    first = run(place, *only)
    assert first.returncode == 0, first.stderr
    path = place / "records" / "tiny" / "cola-exact-seed-0.json"
    record = json.loads(path.read_text())
    assert record["cell"] == {"task": "CoLA", "way": "exact", "seed": 0}
    assert record["results"]["steps"] == 3
    written = path.stat().st_mtime_ns
    again = run(place, *only)
    assert "1 cells, 0 without a record" in again.stderr
    assert path.stat().st_mtime_ns == written
    nothing = run(place, "--only", "no such cell")
    assert nothing.returncode == 2
    assert "matches none of 6 cells" in said(nothing)


def test_a_cell_that_runs_in_another_process_is_passed_over(place):
    lock = place / "work" / "tiny" / "mrpc-exact-seed-0.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        other = run(place, "--only", "*mrpc-exact-seed-0")
    assert other.returncode == 0, other.stderr
    assert "runs in another process" in said(other)
    assert not (place / "records" / "tiny" / "mrpc-exact-seed-0.json").exists()


def test_a_mistake_in_the_last_cell_is_found_before_the_first_runs(place):
    (place / "wrong.toml").write_text(GRID.replace("ratio = 0.5", "ratio = 2"))
    wrong = run(place, grid="wrong")
    assert wrong.returncode == 2
    assert "wrong/cola-rows-0.5: ratio must be in (0, 1], got 2" in said(wrong)
    assert "Traceback" not in wrong.stderr
    assert not (place / "records" / "wrong").exists()
    nowhere = run(place, "--weights", "nowhere")
    assert nowhere.returncode == 2
    assert "weights must be a directory, got 'nowhere'" in said(nowhere)


@pytest.mark.parametrize(
    ("measure", "values", "complaint"),
    [
        (
            "finetune",
            {"task": "CoLA", "model": "model", "exact": True, "epochs": 0},
            "epochs must be a positive integer",
        ),
        ("finetune", {"task": "CoLA", "model": "model", "exact": True, "colour": 0}, "cannot have colour"),
        ("finetune", {"task": "CoLA", "model": "model", "exact": True, "file": "dev.tsv"}, "cannot have file"),
        ("finetune", {"model": "model", "exact": True}, "must have task"),
        ("finetune", {"task": "CoLA", "exact": True}, "must have model"),
        ("finetune", {"task": "CoLA", "model": "other", "exact": True}, "weights must have a directory 'other'"),
        ("finetune", {"task": "RTE", "model": "model", "exact": True}, "RTE: no file"),
        ("memory", {"task": "CoLA", "model": "model", "exact": True, "file": "test.tsv"}, "CoLA: no file .*test.tsv"),
        ("complexity", {"rows": 3, "inputs": 3, "exact": True}, "must have outputs"),
        ("complexity", {"rows": 3, "inputs": 3, "outputs": 3}, "one of exact, recommended"),
        ("complexity", {"rows": 3, "inputs": 3, "outputs": 3, "exact": True, "colour": 0}, "cannot have colour"),
        ("throughput", {"model": "model", "batch_size": 3, "rounds": 1, "threads": 1}, "must have length, ways"),
        ("throughput", {**TIMED, "colour": 0}, "cannot have colour"),
        ("throughput", {**TIMED, "ways": {"rows": {"ratios": 0.5}}}, "cannot have ratios"),
    ],
)
def test_what_is_wrong_with_a_cell_is_said_with_its_name(measure, values, complaint, place):
    with pytest.raises(typer.BadParameter, match=f"grid/bad: .*{complaint}"):
        check_cells([Cell("grid", {"way": "bad"}, measure, values)], Places(place, place, place / "work"))


def test_a_mistake_in_the_data_is_found_before_anything_runs(place, tmp_path):
    write_task(tmp_path, find_task("MRPC"))
    path = tmp_path / "MRPC" / "dev.tsv"
    path.write_text(path.read_text() + "broken\n")
    cells = [cell for cell in read_grid(place / "tiny.toml") if cell.labels["task"] == "MRPC"]
    complaint = r"tiny/mrpc-exact-seed-0: .*dev.tsv, line \d+: 5 columns expected, got 1"
    with pytest.raises(typer.BadParameter, match=complaint):
        check_cells(cells, Places(place, tmp_path, place / "work"))


@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_is_checked(measure, place):
    values: dict[str, dict[str, Any]] = {
        "finetune": {"task": "CoLA", "model": "model", "exact": True},
        "memory": {"task": "CoLA", "model": "model", "exact": True, "file": "dev.tsv"},
        "complexity": {"rows": 3, "inputs": 3, "outputs": 3, "ratio": 0.5},
        "throughput": TIMED,
        "quadratic": {
            "way": "exact", "optimizer": "SGD", "rate": 0.1, "ratio": 0.5, "rows": 8, "inputs": 2, "chains": 1,
            "steps": 1, "burn_in": 1, "seed": 0,
        },
        "noise_limit": {"task": "CoLA", "model": "model", "steps": 1, "seed": 0, "limit": 0.1},
    }  # fmt: skip
    places = Places(place, place, place / "work")
    MEASURES[measure].check(values[measure], places)
    with pytest.raises(ValueError, match="cannot have colour"):
        MEASURES[measure].check({**values[measure], "colour": 0}, places)


def test_counted_operations_are_those_of_the_formulas():
    rows, inputs, outputs, dim = 64, 16, 32, 16
    exact = complexity.count(None, rows, inputs, outputs)
    product = rows * inputs * outputs
    assert (exact["forward_multiply_adds"], exact["backward_multiply_adds"]) == (product, 2 * product)
    assert exact["kept_bytes"] == rows * inputs * 4
    gaussian = complexity.count(SketchConfig(kind="gaussian", dim=dim), rows, inputs, outputs)
    assert gaussian["forward_multiply_adds"] == product + rows * dim * inputs
    assert gaussian["backward_multiply_adds"] == product + rows * dim * outputs + dim * inputs * outputs
    sampled = complexity.count(SketchConfig(dim=dim), rows, inputs, outputs)
    assert sampled["forward_multiply_adds"] == product
    assert sampled["backward_multiply_adds"] == product + dim * inputs * outputs


def test_products_inside_any_module_are_counted():
    with complexity.MultiplyAdds() as counted, torch.no_grad():
        nn.Linear(3, 5)(torch.ones(7, 3))
        torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    assert counted.total == 7 * 3 * 5 + 2 * 3 * 4 * 5

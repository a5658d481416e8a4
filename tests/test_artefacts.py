"""Artefacts: each table and figure of the paper renders from records alone, and says what is missing."""

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest
from artefacts import ARTEFACTS, scores
from artefacts.artefact import GRIDS, HERE, RECORDS, table
from artefacts.names import shown
from artefacts.scores import by_seed, excess_loss, late_loss
from grid import read_grid
from render import write

GLUE_RECORDS = HERE / "records" / "glue"


def results(cell, draw):
    """Return made-up results of a cell, in the form that its measure writes."""
    if cell.measure == "complexity":
        counts = ("dim", "forward_multiply_adds", "backward_multiply_adds", "kept_bytes")
        return dict.fromkeys(counts, draw.randrange(10**9))
    if cell.measure == "throughput":
        rounds = [draw.uniform(0.5, 1.5) for _ in range(5)]
        return {way: {"relative": rounds[0], "relative_of_rounds": rounds} for way in cell.values["ways"]}
    if cell.measure == "memory":
        shape = [cell.values["batch_size"], 100]
        return {"batch_shape": shape, "peak_bytes": draw.randrange(10**9), "kept_bytes": draw.randrange(10**9)}
    if cell.measure == "quadratic":
        numbers = {name: draw.random() for name in ("excess", "standard_error", "theory", "rate_factor")}
        return {**numbers, "curve": [draw.random() for _ in range(20)]}
    if cell.measure == "noise_limit":
        sizes = {"bytes": 10, "exact_bytes": 100}
        fixed = {"rows, ratio=1.0, bits=4": [0.0, 14], "rows, ratio=1.0, bits=2": [10.0, 7]}
        points = [{"step": step, "noise": draw.random(), **sizes, "fixed": fixed} for step in range(0, 150, 5)]
        validation = {"loss": draw.random(), "accuracy": draw.random()}
        return {"losses": [draw.random()] * 150, "points": points, "validation": validation, "changes": []}
    names = ("squared_gradient", "energy", "sgd_variance", "sketch_variance", "scaled_variance")
    ratios = ("alignment", "ratio", "scaled_ratio", "bound")
    point = {name: draw.random() for name in names + ratios}
    return {
        "score": draw.random(),
        "memory": {"kept_bytes": draw.randrange(1, 10**9)},
        "examples": {"train": 100, "eval": 10},
        "noise": {"records": [{"step": step, "layer": "some.layer", **point} for step in range(30)]},
        "curves": {
            "train": [{"step": step, "loss": draw.random()} for step in range(40)],
            "eval": [{"step": step, "loss": draw.random(), "score": draw.random()} for step in (20, 40)],
        },
    }


def write_records(artefact, folder, keep=lambda cell: True):
    draw = random.Random(0)
    for cell in artefact.cells():
        recipe = {"epochs": 1, "batch_size": 16, "learning_rate": 1e-4, "max_length": 128}
        named = {"model": "a model", "task": "CoLA", "recipe": recipe, "config": {"kind": "gaussian", "ratio": 0.5}}
        record = {
            "cell": cell.labels,
            "settings": {**named, **{k: v for k, v in cell.values.items() if cell.measure != "finetune"}},
            "machine": {"cpu": "a processor", "cores": 2},
            "versions": {"torch": "2"},
            "commit": "abc",
            "results": results(cell, draw),
        }
        if keep(cell):
            path = folder / f"{cell.name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record))


@pytest.mark.parametrize("artefact", ARTEFACTS.values(), ids=ARTEFACTS)
def test_it_renders_whole_from_all_records(artefact, tmp_path):
    write_records(artefact, tmp_path)
    page, *pictures = write(artefact, tmp_path, tmp_path / "out")
    text = page.read_text()
    assert text.startswith(f"# {artefact.title}\n")
    assert " – |" not in text
    assert "cells have run" not in text
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"({picture.name})" in text


def test_what_has_not_run_is_marked(tmp_path):
    def has_run(cell):
        return cell.grid == "glue" and (cell.labels["task"] != "MRPC" or "gauss" not in cell.name)

    write_records(ARTEFACTS["glue"], tmp_path, has_run)
    (page, _) = write(ARTEFACTS["glue"], tmp_path, tmp_path / "out")
    text = page.read_text()
    assert re.search(rf"\*\*\d+ of {len(ARTEFACTS['glue'].cells())} cells have run", text)
    assert all(" – |" in line for line in text.splitlines() if line.startswith("| the paper's Gaussian"))
    assert "The comparison at a tenth of the bytes is not complete." in text


@pytest.mark.parametrize("chance", range(3))
@pytest.mark.parametrize("artefact", ARTEFACTS.values(), ids=ARTEFACTS)
def test_what_is_missing_does_not_move_what_is_there(artefact, chance, tmp_path):
    cells = artefact.cells()
    chosen = {cell.name for cell in random.Random(chance).sample(cells, max(1, len(cells) // 2))}
    write_records(artefact, tmp_path, lambda cell: cell.name in chosen)
    (page, *_) = write(artefact, tmp_path, tmp_path / "out")
    text = page.read_text()
    if len(chosen) < len(cells):
        assert f"**{len(chosen)} of {len(cells)} cells have run; the others are missing here.**" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_nothing_is_saved_beside_a_peak_that_is_missing(tmp_path):
    write_records(ARTEFACTS["peaks"], tmp_path, lambda cell: cell.labels["way"] != "exact")
    (page,) = write(ARTEFACTS["peaks"], tmp_path, tmp_path / "out")
    saved = page.read_text().split("Saved of the peak")[1]
    assert "– |" in saved
    assert "%" not in saved.split("The paper's own")[0].split("---")[-1]


def lines_of(artefact, folder):
    """Return how the lines of a figure from all records are drawn, by their labels."""
    write_records(artefact, folder)
    _, figure = artefact.render(artefact.records(folder))
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    return dict(zip(labels, handles, strict=True)), figure


@pytest.mark.parametrize("name", ["curves", "batches"])
def test_no_two_lines_look_alike(name, tmp_path):
    lines, _ = lines_of(ARTEFACTS[name], tmp_path)
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines.values()]
    assert len(set(looks)) == len(lines) > 4
    gaussian = [line for label, line in lines.items() if "Gaussian" in label]
    assert len({line.get_linestyle() for line in gaussian}) == len(gaussian)


@pytest.mark.parametrize("name", ["curves", "batches", "glue", "throughput"])
def test_the_legend_lies_beside_the_panels_in_order(name, tmp_path):
    _, figure = lines_of(ARTEFACTS[name], tmp_path)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert not any(legend.get_window_extent().overlaps(axes.get_tightbbox()) for axes in figure.axes)
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[0] == ("exact" if name != "throughput" else "the paper's Gaussian")
    ratios = [float(label.split()[-1]) for label in labels if "ρ" in label and "Gaussian" in label]
    assert ratios == sorted(ratios, reverse=True)


def test_points_of_one_share_stand_side_by_side(tmp_path):
    lines, _ = lines_of(ARTEFACTS["glue"], tmp_path)
    others = ("exact", "in the paper (ten columns)")
    least = [bar.lines[0].get_xdata()[0] for label, bar in lines.items() if label not in others]
    assert len(set(least)) == len(least) == 3
    assert all(0.85 < share / 0.1 <= 1.0 for share in least)


def test_the_mean_of_a_seed_needs_all_its_tasks():
    records = [
        {"grid": "glue", "cell": {"task": task, "way": "exact", "seed": seed}, "results": {"score": score}}
        for task, seed, score in (("a", 0, 0.5), ("b", 0, 0.7), ("a", 1, 0.9))
    ]
    assert by_seed(records, "exact", ["a", "b"]) == {0: pytest.approx(60)}


def test_training_loss_is_compared_with_exact_training_of_the_same_seed():
    def record(way, seed, losses):
        curves = {"train": [{"step": step, "loss": loss} for step, loss in enumerate(losses)]}
        return {"grid": "glue", "cell": {"task": "a", "way": way, "seed": seed}, "results": {"curves": curves}}

    exact = [record("exact", 0, [9, 9, 2, 2]), record("exact", 1, [9, 9, 4, 4])]
    rows = [record("rows", 0, [9, 9, 3, 3]), record("rows", 1, [9, 9, 4, 4]), record("rows", 2, [1, 1, 1, 1])]
    assert excess_loss(exact + rows, "rows", "a") == pytest.approx([0.5, 0])
    assert excess_loss(rows, "rows", "a") == []
    diverged = excess_loss([exact[0], record("rows", 0, [9, 9, 3, None])], "rows", "a")
    assert scores.cell(diverged) == "diverged <sub>1</sub>"


def test_intervals_and_cells_by_hand():
    assert scores.interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)
    assert scores.cell([1.0, 2.0, 3.0]) == "2.0 ± 1.0 <sub>3</sub>"
    assert scores.cell([-1.5], "+.1f") == "-1.5 <sub>1</sub>"
    assert scores.cell([]) == "–"
    assert scores.cell([1.0, math.nan]) == "diverged <sub>2</sub>"


def test_a_table_is_markdown():
    assert table(["a", "b"], [["c", "1"]]) == "| a | b |\n| --- | ---: |\n| c | 1 |"


def test_an_unknown_name_is_refused():
    command = [sys.executable, str(Path(HERE) / "render.py"), "no-such"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "no-such" in run.stderr


@pytest.mark.parametrize("artefact", ARTEFACTS.values(), ids=ARTEFACTS)
def test_committed_pages_are_what_the_committed_records_say(artefact, tmp_path):
    page = HERE / "rendered" / f"{artefact.name}.md"
    found = artefact.records()
    if not found:
        assert not page.exists()
        pytest.skip(f"no records of {', '.join(artefact.grids)}")
    (written, *_) = write(artefact, HERE / "records", tmp_path)
    assert page.read_text() == written.read_text()


@pytest.mark.parametrize("artefact", ARTEFACTS.values(), ids=ARTEFACTS)
def test_the_status_of_an_artefact_is_true(artefact):
    (line,) = [line for line in (HERE / "README.md").read_text().splitlines() if f"render.py {artefact.name}`" in line]
    count, cells = len(artefact.records()), len(artefact.cells())
    said = re.search(r"(\d+) of (\d+) cells", line)
    assert (int(said[1]), int(said[2])) == (count, cells) if said else count == 0


@pytest.mark.parametrize("artefact", ARTEFACTS.values(), ids=ARTEFACTS)
def test_the_page_names_the_grids_of_an_artefact(artefact):
    lines = (HERE / "README.md").read_text().splitlines()
    (line,) = [line for line in lines if f"render.py {artefact.name}`" in line]
    assert line.split("|")[2].strip() == ", ".join(f"`{grid}`" for grid in artefact.grids)


@pytest.mark.parametrize("way", ["exact", "recommended 0.1", "gaussian 0.1"])
def test_the_table_of_late_losses_on_sts_b_is_true(way):
    cells = [cell for grid in ("glue", "plateau") for cell in read_grid(GRIDS / f"{grid}.toml")]
    chosen = [cell for cell in cells if (cell.labels["task"], cell.labels["way"]) == ("STS-B", way)]
    losses = [late_loss(json.loads((RECORDS / f"{cell.name}.json").read_text())) for cell in chosen]
    line = [shown(way), *(f"{loss:.2f}" for loss in losses)]
    assert f"| {' | '.join(line)} |" in (HERE / "README.md").read_text()


def gap_of(ours, others):
    found = scores.gaps(ours, others)
    return "{:+.2f} ({:+.1f} to {:+.1f})".format(mean(found), *scores.interval(found))


def test_the_readme_says_what_the_records_say():
    records = ARTEFACTS["glue"].records()
    readme = " ".join((HERE.parent / "README.md").read_text().split())
    tasks = sorted({record["cell"]["task"] for record in records if "task" in record["cell"]})
    named = {"exact": "exact", "recommended 0.1": "`sketch_(model)`", "gaussian 0.1": "the paper's Gaussian"}
    small = {way: by_seed(records, way, tasks) for way in named}
    learned = [record for record in records if record["cell"].get("task") != "WNLI"]
    without = {way: by_seed(learned, way, tasks[:-1]) for way in named}
    base = {way: list(by_seed(records, way, ["CoLA"], "base").values()) for way in named}
    assert tasks[-1] == "WNLI"
    assert {len(found) for found in base.values()} == {3}
    seeds = {tuple(found) for found in (*small.values(), *without.values())}
    assert len(seeds) == 1
    assert f"mean score over {[None, 'one', 'two', 'three', 'four', 'five', 'six'][len(*seeds)]} seeds" in readme
    ahead, there = (gap_of(found["recommended 0.1"], found["gaussian 0.1"]) for found in (small, without))
    assert f"the paper's Gaussian by {ahead}, without WNLI by {there}." in readme
    for way, name in named.items():
        gaps = " | " if way == "exact" else " | ".join(gap_of(each[way], each["exact"]) for each in (small, without))
        kept = "100%" if way == "exact" else "10%"
        of_base = f"{mean(base[way]):.1f} ± {stdev(base[way]):.1f}"
        line = f"| {name} | {kept} | {mean(small[way].values()):.1f} | {gaps} | {of_base} |"
        assert " ".join(line.split()) in readme
    for way in ("gaussian 0.1", "recommended 0.1"):
        excess = {task: 100 * mean(excess_loss(records, way, task)) for task in tasks[:-1]}
        assert ", ".join(f"{value:+.1f}% on {task}" for task, value in excess.items()) in readme

"""The command line through its real entry point: help, one real run, and one line for a mistake."""

import json
import sys

import pytest

from backsketch import SKETCHES, SketchConfig
from backsketch.cli import main
from backsketch.programs.glue.tasks import find_task
from commands import call, check_mistake, python
from glue_files import write_task
from tiny_bert import save_tiny_bert

COMMANDS = ["bench", "doctor", "finetune", "frontier", "profile"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    write_task(folder, find_task("cola"))
    save_tiny_bert(folder / "model")
    return folder


def test_finetune_runs_end_to_end(place):
    options = ("--task", "cola", "--model", "model", "--data", ".", "--ratio", "0.1", "--max-steps", "5")
    run = call("finetune", *options, "--threads", "1", "--json", cwd=place)
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    record = json.loads(run.stdout)
    assert record["results"]["steps"] == 5
    assert [json.loads(path.read_text()) for path in place.glob("runs/*/record.json")] == [record]


def test_finetune_says_what_came_out(place, tmp_path, capsys):
    options = ["--task", "cola", "--model", str(place / "model"), "--data", str(place), "--out", str(tmp_path)]
    assert main(["finetune", *options, "--exact", "--max-steps", "2", "--batch-size", "4"]) == 0
    shown = capsys.readouterr()
    assert "none (exact)" in shown.out
    assert str(tmp_path / "record.json") in shown.out
    assert "matthews" in shown.err
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["settings"]["config"], record["settings"]["recipe"]["batch_size"]) == (None, 4)


def test_a_budget_alone_plans_ratios_and_bits(place, tmp_path, capsys):
    options = ["--task", "cola", "--model", str(place / "model"), "--data", str(place), "--out", str(tmp_path)]
    assert main(["finetune", *options, "--budget", "40%", "--max-steps", "1", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["results"]["planned"]
    assert len({config["bits"] for config in planned.values() if config is not None} - {4}) > 0


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_on_one_line(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: backsketch {command}" in shown
    assert "--json" in shown
    place = shown.splitlines().index(next(line for line in shown.splitlines() if "Example: backsketch" in line))
    assert not shown.splitlines()[place + 1].strip()
    assert max(map(len, shown.splitlines())) <= 80


def test_the_help_of_finetune_tells_kinds_and_defaults(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["finetune", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ", ".join(SKETCHES) in shown
    assert "default: rows in 3 bits, rotated, a tenth of fp32 bytes" in shown
    assert "0 is off. Default: about 50 times a run" in shown
    assert "DIR/CoLA/train.tsv" in shown
    assert SketchConfig.recommended().bits == 3


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {command} " in shown for command in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("backsketch 0.")


MISTAKES = [
    (["colour"], "No such command 'colour'"),
    (["finetune"], "Missing option '--task'"),
    (["finetune", "--task", "colour"], "task must be one of"),
    (["finetune", "--task", "cola", "--colour", "red"], "No such option: --colour"),
    (["finetune", "--task", "cola", "--ratio", "much"], "--ratio"),
    (["finetune", "--task", "cola", "--ratio", "2"], "ratio must be in (0, 1], got 2.0"),
    (["finetune", "--task", "cola", "--ratio", "0.1", "--dim", "3"], "give ratio or dim, not both"),
    (["finetune", "--task", "cola", "--kind", "colour"], "kind must be one of"),
    (["finetune", "--task", "cola", "--bits", "5"], "bits must be"),
    (["finetune", "--task", "cola", "--exact", "--bits", "4"], "--exact keeps everything: it excludes --bits"),
    (["finetune", "--task", "cola", "--exact", "--ignore-mask"], "it excludes --ignore-mask"),
    (["finetune", "--task", "cola", "--exact", "--noise-layer", "*"], "it excludes --noise-layer"),
    (["finetune", "--task", "cola", "--exact", "--noise-every", "3"], "it excludes --noise-every"),
    (["finetune", "--task", "cola", "--noise-every", "0", "--noise-layer", "*"], "--noise-layer records what --noise-"),
    (["finetune", "--task", "cola", "--epochs", "0"], "epochs must be a positive integer, got 0"),
    (["finetune", "--task", "cola", "--data", "nowhere"], "data must be a directory, got 'nowhere'"),
    (["finetune", "--task", "cola", "--model", "./nowhere"], "model must be"),
    (["finetune", "--task", "rte", "--data", ".", "--model", "model"], "RTE: no file"),
    (["finetune", "--task", "cola", "--data", ".", "--model", "model", "--exclude", "x*"], "'x*' matches no linear"),
    (["finetune", "--task", "cola", "--data", ".", "--model", "model", "--budget", "0.0001%"], "budget must be at"),
    (["finetune", "--task", "cola", "--data", ".", "--model", "model", "--budget", "much"], "budget must be"),
    (
        ["finetune", "--task", "cola", "--budget", "20%", "--ratio", "0.1"],
        "--budget finds the ratio: it excludes --ratio",
    ),
    (["finetune", "--task", "cola", "--budget", "20%", "--dim", "8"], "--budget finds the ratio: it excludes --dim"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(case[0][1:]) for case in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    check_mistake(arguments, message, capsys)


def test_a_mistake_ends_the_process_likewise():
    run = call("finetune", "--task", "colour")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("missing", ["transformers", "accelerate", "filelock", "numpy", "sklearn", "scipy"])
def test_a_missing_extra_is_named(missing, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["finetune", "--task", "cola"]) == 1
    assert capsys.readouterr().err == f"backsketch: this needs {missing}: pip install 'backsketch[transformers]'\n"


def test_without_typer_the_command_line_names_its_extra():
    code = "import sys; sys.modules['typer'] = None; from backsketch.cli import main; sys.exit(main([]))"
    run = python("-c", code)
    assert run.returncode == 1
    assert run.stderr == "backsketch: the command line needs typer: pip install 'backsketch[cli]'\n"

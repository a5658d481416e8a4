"""The demo through its real entry point, on a model small enough for the suite, and what it promises of itself."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import backsketch
from backsketch import saved_memory
from backsketch.cli import main
from backsketch.programs.demo import run as demo_run
from backsketch.programs.demo import scale as demo_scale
from backsketch.programs.demo.contenders import CONTENDERS
from backsketch.programs.demo.measuring import measure_memory, profile_exact
from backsketch.programs.demo.model import ByteModel, Size, next_byte_loss
from backsketch.programs.demo.outcome import _promises, outcome
from backsketch.programs.demo.scale import FULL, QUICK, Scale
from backsketch.programs.demo.table import percent_above, result_table
from backsketch.programs.demo.text import Text, read_library
from backsketch.programs.demo.training import prepare, train

TINY = Scale(
    size=Size(hidden=32, heads=2, layers=1, length=16),
    batch=5,
    steps=4,
    learning_rate=1e-3,
    looks=2,
    validation_batches=2,
    noise_looks=1,
)
KEYS = ["exact", "paper", "rows", "recommended", "whole", "checkpointing"]


@pytest.fixture(scope="module")
def text():
    return read_library()


@pytest.fixture(scope="module")
def results(text):
    race = prepare(TINY, text, 0, lambda _: None)
    train(race, text, 0, lambda _: None)
    return outcome(race)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(demo_scale, "QUICK", TINY)


def start(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(Path(backsketch.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "backsketch", "demo", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


def test_the_demo_says_and_writes_what_came_out(tiny, tmp_path, capsys):
    assert main(["demo", "--quick", "--out", str(tmp_path / "new")]) == 0
    shown = capsys.readouterr()
    assert [line.split("  ")[0] for line in shown.out.splitlines()[2:8]] == [each.name for each in CONTENDERS]
    assert str(tmp_path / "new" / "demo.png") in shown.out
    assert (tmp_path / "new" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "new" / "demo.json").read_text())["results"]["finished"]
    assert "step 4 of 4" in shown.err
    assert max(map(len, shown.out.splitlines()[:-3])) <= 82


def test_json_is_the_record_and_nothing_else(tiny, tmp_path, capsys):
    assert main(["demo", "--quick", "--json", "--out", str(tmp_path), "--seed", "3"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == json.loads((tmp_path / "demo.json").read_text())
    assert json.loads(shown.out)["settings"]["seed"] == 3
    assert not shown.err


def test_all_start_from_one_model_and_checkpointing_repeats_exact_training(results):
    losses = {key: entry["training"] for key, entry in results["contenders"].items()}
    assert list(losses) == KEYS
    assert len({first for first, *_ in losses.values()}) == 1
    assert losses["checkpointing"] == losses["exact"]
    assert len({last for *_, last in losses.values()}) == 5


def test_the_noise_of_rows_is_what_the_law_says(results):
    rows = TINY.batch * TINY.size.length
    assert results["contenders"]["rows"]["noise"] == pytest.approx(rows / round(rows * 0.1) - 1)
    noise = {key: entry["noise"] for key, entry in results["contenders"].items()}
    assert noise["exact"] is noise["checkpointing"] is None
    assert 0 < noise["recommended"] < 1 < noise["rows"]
    assert noise["paper"] > 1


def test_a_seed_gives_the_same_run_again_and_another_seed_another(text, results):
    def losses(seed):
        race = prepare(TINY, text, seed, lambda _: None)
        train(race, text, seed, lambda _: None)
        return [lane.losses for lane in race.lanes]

    assert losses(0) == [entry["training"] for entry in results["contenders"].values()]
    assert losses(1)[0] != losses(0)[0]


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
def test_the_promised_bytes_hold_for_the_shapes_of_the_demo(scale):
    """On fewer rows: shares do not depend on them."""
    model, batch = ByteModel(scale.size), torch.randint(0, 256, (2, scale.size.length + 1))
    seen = profile_exact(model, batch)
    memory = {each.key: measure_memory(each, model, batch, seen) for each in CONTENDERS}
    assert memory["recommended"].linear <= 0.15 * memory["exact"].linear
    assert memory["recommended"].kept <= 0.75 * memory["exact"].kept
    assert memory["whole"].kept <= 0.25 * memory["exact"].kept
    assert memory["whole"].peak < memory["recommended"].peak
    assert 1 / 3 <= memory["exact"].linear / memory["exact"].kept <= 0.4
    assert memory["exact"].kept > memory["recommended"].kept > memory["checkpointing"].kept


def test_kept_bytes_are_those_that_autograd_saves():
    model, batch = ByteModel(TINY.size), torch.randint(0, 256, (TINY.batch, TINY.size.length + 1))
    seen = profile_exact(model, batch)
    for contender in CONTENDERS[:5]:
        kept = measure_memory(contender, model, batch, seen).kept
        own = ByteModel(TINY.size)
        contender.convert(own, seen)
        with saved_memory(own) as saved:
            loss = next_byte_loss(own, batch)
        # Tables of a few kB, which all calls use, count as live once a call has used them.
        assert 0 <= kept - saved.activations <= (0 if contender.config is None else 4096)
        del loss


def test_a_missed_promise_is_shown_as_missed(results):
    contenders = json.loads(json.dumps(results["contenders"]))
    contenders["recommended"] |= {"linear_bytes": 10**9, "kept_bytes": 10**9, "speed": 0.9, "loss_above_exact": 0.02}
    contenders["whole"] |= {"kept_bytes": 10**9, "loss_above_exact": 0.03}
    contenders["rows"]["speed"] = 0.99
    missed = str(result_table({**results, "promises": list(_promises(contenders))}))
    assert missed.count("MISSED") == 7
    contenders["recommended"] |= {"linear_bytes": 1, "kept_bytes": 1, "speed": 0.95, "loss_above_exact": 0.01}
    contenders["whole"] |= {"kept_bytes": 1, "loss_above_exact": 0.02}
    contenders["rows"]["speed"] = 1.01
    assert "MISSED" not in str(result_table({**results, "promises": list(_promises(contenders))}))


def test_a_busy_machine_is_named(results):
    assert 0 < results["own_share"] <= 1.01
    busy = str(result_table({**results, "own_share": 0.4}))
    assert "This machine was busy: steps ran 40%" in busy
    assert max(map(len, busy.splitlines())) <= 82
    assert "busy" not in str(result_table({**results, "own_share": 0.95}))


def test_ctrl_c_shows_and_saves_how_far_it_came(tiny, tmp_path, monkeypatch, capsys):
    def stop(_, race):
        if race.steps == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(demo_run.View, "show", stop)  # type: ignore[attr-defined]
    assert main(["demo", "--quick", "--out", str(tmp_path)]) == 130
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1] == "backsketch: stopped after 3 steps"
    assert "after 3 steps" in shown.out
    results = json.loads((tmp_path / "demo.json").read_text())["results"]
    assert (results["steps"], results["finished"]) == (3, False)
    assert results["contenders"]["rows"]["validation"][-1][0] == 2
    assert (tmp_path / "demo.png").is_file()


def test_ctrl_c_before_the_first_step_leaves_cleanly(tmp_path):
    process = start("--quick", cwd=tmp_path)
    assert "measuring" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "backsketch: stopped before the first step was done"
    assert (out, list((tmp_path / "backsketch-demo").iterdir())) == ("", [])


MISTAKES = [(["--threads", "0"], "--threads"), (["--seed", "x"], "--seed"), (["--out", __file__], "File exists")]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=["threads", "seed", "out"])
def test_a_mistake_is_one_line_and_exit_code_2(options, message, capsys):
    assert main(["demo", *options]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1
    assert message in shown[0]


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_a_missing_extra_is_named(missing, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == f"backsketch: this needs {missing}: pip install 'backsketch[cli]'\n"


def test_text_is_drawn_alike_for_a_seed_and_validated_on_other_files(tmp_path):
    for index in range(20):
        (tmp_path / f"{index:02}.py").write_bytes(bytes([index]) * 6000)
    text = read_library(tmp_path)
    assert set(text.validation.tolist()) == {0, 10}
    assert not set(text.validation.tolist()) & set(text.training.tolist())
    batches = [next(text.batches(3, 8, seed)) for seed in (1, 1, 2)]
    assert batches[0].shape == (3, 9)
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    first, *_, last = text.validation_batches(4, 2, 8)
    assert (first[0].tolist(), last[-1].tolist()) == ([0] * 9, [10] * 9)


def test_windows_are_stretches_of_the_text():
    text = Text(torch.arange(200, dtype=torch.uint8), torch.arange(50, dtype=torch.uint8))
    assert (next(text.batches(4, 10, 0)).diff() == 1).all()


def test_without_sources_the_demo_says_so(tmp_path):
    with pytest.raises(ValueError, match="too few"):
        read_library(tmp_path)


def test_the_model_sees_no_byte_before_it_is_its_turn():
    model = ByteModel(TINY.size)
    text = torch.randint(0, 256, (1, 16))
    changed = torch.cat((text[:, :9], 255 - text[:, 9:]), dim=1)
    same = torch.isclose(model(text), model(changed), atol=1e-6).all(-1)[0]
    assert same.tolist() == [True] * 9 + [False] * 7
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    assert next_byte_loss(model, text).item() == pytest.approx(math.log(256))


def test_the_learning_rate_rises_and_falls_and_the_last_step_is_looked_at():
    rates = [FULL.rate_at(step) for step in range(FULL.steps)]
    top = rates.index(max(rates))
    assert 0 < rates[0] < rates[top] == FULL.learning_rate
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[-1] < 0.1 * FULL.learning_rate
    assert FULL.look_steps()[-1] == FULL.noise_steps()[-1] == FULL.steps


@pytest.mark.slow
def test_the_quick_demo_keeps_its_promises_of_bytes_and_loss(tmp_path):
    process = start("--quick", "--json", cwd=tmp_path)
    out, error = process.communicate()
    assert process.returncode == 0, error
    promises = json.loads(out)["results"]["promises"]
    assert [promise["met"] for promise in promises if "×" not in promise["shown"]] == [True] * 5


def test_a_loss_is_never_minus_nothing():
    assert [percent_above(share) for share in (-0.0001, 0.0004, -0.001)] == ["+0.0%", "+0.0%", "-0.1%"]

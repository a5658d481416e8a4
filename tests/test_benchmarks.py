"""The benchmarks run, and what does not depend on the clock is checked."""

import copy
import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from transformers import RobertaConfig, RobertaForSequenceClassification

from backsketch_bench import speed
from backsketch_bench.contenders import encoder_contenders
from backsketch_bench.timing import best_times

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("speed")
    command = [sys.executable, BENCHMARKS / "speed.py", "--quick", "--part", "transient", "--out", out]
    subprocess.run(command, check=True, capture_output=True)
    assert (out / "speed.json").exists()
    assert next(out.glob("*.md")).read_text().count("MiB") > 10
    return json.loads((out / "speed.json").read_text())


def test_a_record_says_what_it_was_made_with(record):
    assert set(record) == {"when", "settings", "versions", "commit", "machine", "results"}


def test_a_row_or_blocked_sketch_needs_no_more_than_what_it_keeps(record):
    """Beyond nn.Linear, a step's peak is what is kept and at most 1 MiB."""
    for row in record["results"]["transient"]:
        if row["name"].startswith(("rows", "hash")) or "block" in row["name"]:
            assert row["beyond_linear"] <= row["kept"] + 2**20, row["name"]


def test_a_wrong_part_is_named():
    run = subprocess.run([sys.executable, BENCHMARKS / "speed.py", "--part", "colour"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "colour" in run.stderr


def test_what_is_prepared_for_a_step_is_there_and_is_not_timed():
    log = []

    @contextmanager
    def prepared():
        log.append("ready")
        time.sleep(0.05)
        yield
        log.append("undone")

    times = best_times({"step": lambda: log.append("step")}, rounds=2, title="", prepare={"step": prepared})
    assert log == ["ready", "step", "undone"] * 3
    assert times["step"] < 0.05


def small_encoder():
    config = RobertaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = RobertaForSequenceClassification(config).train()
    return model, {"input_ids": torch.randint(5, 50, (4, 16)), "labels": torch.tensor([0, 1, 0, 1])}


def gradients(model, inputs):
    model(**inputs).loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def traits(module):
    own = set(vars(module)) if isinstance(module, torch.nn.Linear) else None
    return type(module), own, len(module._forward_hooks), len(module._forward_pre_hooks)


@pytest.mark.parametrize("way", encoder_contenders(), ids=lambda way: way.name)
def test_a_way_to_train_leaves_the_model_as_it_was(way):
    model, inputs = small_encoder()
    before, expected = copy.deepcopy(model), gradients(model, inputs)
    with way.applied(model), way.context():
        if way.ratio < 1:
            converted = gradients(model, inputs)
            assert not all(map(torch.equal, converted, expected))
    assert list(map(traits, model.modules())) == list(map(traits, before.modules()))
    assert not model.is_gradient_checkpointing
    assert all(map(torch.equal, gradients(model, inputs), expected))


def test_all_ways_share_one_encoder(monkeypatch):
    """Ten copies of RoBERTa-base do not fit in a small machine's memory."""
    made = []
    monkeypatch.setattr(copy, "deepcopy", lambda module, *rest: made.append(module))
    entries = {entry["name"]: entry for entry in speed.encoder(quick=True)}
    assert not made
    assert set(entries) == {way.name for way in encoder_contenders()}
    assert entries["rows, ratio 0.1"]["kept"] < entries["rows, ratio 0.5"]["kept"] < entries["exact"]["kept"]
    assert entries["checkpointing"]["kept"] < entries["exact"]["kept"]
    assert all(entry["speed"] > 0 and entry["peak"] > 0 for entry in entries.values())

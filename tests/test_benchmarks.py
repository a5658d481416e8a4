"""The benchmarks run, and what does not depend on the clock is checked."""

import copy
import itertools
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

from backsketch.cli import main
from backsketch.programs import page_keeping
from backsketch_bench import speed, speed_allocators
from backsketch_bench.contenders import encoder_contenders
from backsketch_bench.speed_tables import section
from backsketch_bench.timing import best_times
from commands import call, check_mistake, python
from glue_files import WORDS
from tiny_bert import save_tiny_bert
from tiny_llama import save_tiny_llama

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("speed")
    run = call("bench", "--quick", "--part", "transient", "--threads", "1", "--json", cwd=out)
    assert (run.returncode, run.stderr) == (0, "")
    assert next(out.glob("bench/quick/*.md")).read_text().count("MiB") > 10
    record = json.loads(run.stdout)
    assert record == json.loads((out / "bench" / "quick" / "speed.json").read_text())
    return record


def test_a_record_says_what_it_was_made_with(record):
    assert set(record) == {"when", "settings", "versions", "commit", "machine", "results"}


def test_a_row_or_blocked_sketch_needs_no_more_than_what_it_keeps(record):
    """Beyond nn.Linear, a step's peak is what is kept and at most 1 MiB."""
    rows = record["results"]["transient"]
    light = [row for row in rows if row["name"].startswith(("rows", "hash")) or "block" in row["name"]]
    assert light
    for row in light:
        assert row["beyond_linear"] <= row["kept"] + 2**20, row["name"]


def test_the_script_is_the_command():
    run = python(str(BENCHMARKS / "speed.py"), "--part", "colour")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("backsketch: part must be one of layers")


MISTAKES = [
    (
        ["bench", "--part", "colour"],
        "part must be one of layers, layers-bfloat16, allocators, kinds, overhead, transient, growth, encoder, "
        "encoder-bfloat16, dropout, got 'colour'",
    ),
    (["bench", "--threads", "0"], "threads must be a positive integer, got 0"),
    (["bench", "--colour", "red"], "No such option: --colour"),
    (["frontier", "--model", "nowhere"], "model must be a directory with config.json, got 'nowhere'"),
    (["frontier", "--model", "model"], "a model needs its data: give --data FILE and --columns LABEL,TEXT"),
    (["frontier", "--model", "model", "--data", "x.tsv", "--columns", "a"], "a model needs its data"),
    (["frontier", "--model", "model", "--data", "nowhere", "--columns", "a,b"], "data must be a file, got 'nowhere'"),
    (["frontier", "--model", "model", "--data", "x.tsv", "--columns", "a,c"], "columns must be among a, b, got c"),
    (["frontier", "--model", "model", "--data", "x.tsv", "--columns", "a,b"], "at least 32 examples with these col"),
    (["frontier", "--data", "x.tsv"], "data, columns and text are for a model of yours: give --model too"),
    (["frontier", "--text", "x.tsv"], "data, columns and text are for a model of yours: give --model too"),
    (["frontier", "--model", "model", "--text", "nowhere"], "text must be a file, got 'nowhere'"),
    (["frontier", "--model", "model", "--text", "x.tsv", "--data", "x.tsv"], "for an encoder, not both"),
    (["frontier", "--dtype", "int8"], "dtype must be one of float32, bfloat16, got int8"),
    (["frontier", "--steps", "0"], "steps must be a positive integer, got 0"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.tsv").write_text("a\tb\n1\ttext\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    check_mistake(arguments, message, capsys)


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [("bench", "matplotlib", "cli"), ("bench", "transformers", "transformers"), ("frontier", "matplotlib", "cli")],
)
def test_a_missing_extra_is_named(command, missing, extra, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    assert main([command, "--quick"]) == 1
    assert capsys.readouterr().err == f"backsketch: this needs {missing}: pip install 'backsketch[{extra}]'\n"


def test_help_names_every_part(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert all(part in shown for part in speed.PARTS)


@pytest.fixture
def counted(monkeypatch):
    """Replace the parts by ones that only count how often they ran."""
    ran = []
    entries = {
        "overhead": {"name": "exact", "forward_us": 1.0, "step_us": 2.0},
        "growth": {"name": "rows", "rows": [1, 2], "seconds": [1.0, 2.0], "slope": 1.0, "last_slope": 1.0},
    }
    for name, entry in entries.items():
        monkeypatch.setitem(speed.PARTS, name, lambda quick, name=name, entry=entry: ran.append(name) or [entry])  # type: ignore[func-returns-value]
    return ran


def bench(*arguments):
    return main(["bench", "--threads", "1", "--part", "overhead", "--part", "growth", *arguments])


def test_finished_parts_are_kept_until_fresh_is_asked_for(counted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bench("--quick") == bench("--quick") == 0
    assert counted == ["overhead", "growth"]
    shown = capsys.readouterr().out
    assert shown.count("Tiny layers") == 2
    assert "wrote bench/quick/speed.json" in shown
    assert main(["bench", "--threads", "1", "--quick", "--fresh", "--part", "growth"]) == 0
    assert counted == ["overhead", "growth", "growth"]
    record = json.loads((tmp_path / "bench" / "quick" / "speed.json").read_text())
    assert set(record["results"]) == {"overhead", "growth"}


def test_a_record_of_other_settings_is_not_continued(counted, tmp_path, capsys):
    assert bench("--quick", "--out", str(tmp_path)) == 0
    assert bench("--out", str(tmp_path)) == 2
    assert "was made with other settings (quick, threads=1): give --fresh" in capsys.readouterr().err
    assert bench("--out", str(tmp_path), "--fresh") == 0
    assert counted == ["overhead", "growth"] * 2


def test_the_frontier_command_measures_the_byte_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["frontier", "--quick", "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    assert "gaussian 0.1, paper" in shown
    *table, written = shown.splitlines()
    assert written.startswith("wrote bench/quick/frontier.json")
    assert max(map(len, table)) <= 80
    record = json.loads((tmp_path / "bench" / "quick" / "frontier.json").read_text())
    kept = {point["family"]: point["bytes"] for point in record["results"]["points"] if point["config"]["ratio"] == 0.1}
    assert kept["2 bits rotated"] < kept["3 bits rotated"] < kept["8 bits rotated"] < kept["paper"]
    assert (tmp_path / "bench" / "quick" / "frontier.png").exists()


def test_the_frontier_command_measures_a_language_model_in_its_type(tmp_path, capsys):
    save_tiny_llama(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(WORDS[number % len(WORDS)] for number in range(300)))
    options = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--dtype", "bfloat16"]
    assert main(["frontier", *options, "--quick", "--json", "--threads", "1", "--out", str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "frontier-lm-bfloat16.json").read_text())
    used, results = record["settings"], record["results"]
    assert (used["layers"], used["dtype"], used["padding"], used["left_out"]) == (7, "bfloat16", 0, ["lm_head"])
    assert not any(point["masked"] for point in results["points"])
    kept = next(point for point in results["points"] if point["family"] == "8 bits")
    assert kept["bytes"] > 0.5  # a byte a value and its ranges, of inputs with two
    assert set(results["layers"]) >= {point["worst"] for point in results["points"]}


def test_a_text_must_have_more_tokens_than_a_window(tmp_path, capsys):
    save_tiny_llama(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a few words")
    options = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")]
    check_mistake(["frontier", *options], "text must have more than 128 tokens, got 3", capsys)


def test_the_frontier_command_measures_a_model_of_ones_own(tmp_path, capsys):
    model = save_tiny_bert(tmp_path / "model")
    rows = "".join(f"{number % 2}\t{WORDS[number % len(WORDS)]} {WORDS[-1]}\n" for number in range(40))
    (tmp_path / "data.tsv").write_text(f"label\ttext\n{rows}")
    options = ["--model", model, "--data", str(tmp_path / "data.tsv"), "--columns", "label,text"]
    assert main(["frontier", *options, "--quick", "--json", "--out", str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["settings"]["layers"], record["settings"]["steps"]) == (12, 3)
    assert record == json.loads((tmp_path / "frontier.json").read_text())


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


@pytest.mark.slow
def test_all_ways_share_one_encoder(monkeypatch):
    """Ten copies of RoBERTa-base do not fit in a small machine's memory."""
    made, copied = [], copy.deepcopy

    def watched(value, *rest):
        if isinstance(value, torch.nn.Module):
            made.append(value)
        return copied(value, *rest)

    monkeypatch.setattr(copy, "deepcopy", watched)
    entries = {entry["name"]: entry for entry in speed.PARTS["encoder"](True)}
    assert not made
    assert set(entries) == {way.name for way in encoder_contenders()}
    assert entries["rows, ratio 0.1"]["kept"] < entries["rows, ratio 0.5"]["kept"] < entries["exact"]["kept"]
    assert entries["checkpointing"]["kept"] < entries["exact"]["kept"]
    peaks = [entries[name]["peak"] for name in ("rows, ratio 0.1", "rows, ratio 0.5", "exact")]
    assert all(lower < higher - 2**20 for lower, higher in itertools.pairwise(peaks))  # tables show whole MiB
    assert all(entry["speed"] > 0 and entry["peak"] > 0 for entry in entries.values())


def test_each_type_is_timed_for_every_shape_and_way():
    found = {entry["name"]: entry for entry in speed.PARTS["layers-bfloat16"](True)}
    assert {"exact", "recommended", "rows, ratio 0.1", "all rows, 3 bits, rotated"} <= set(found)
    for entry in found.values():
        assert list(entry["speeds"]) == ["768 -> 3072", "3072 -> 768", "384 -> 384", "384 -> 1536"]
    assert found["exact"]["kept"]["384 -> 384"] == 512 * 384 * 2
    assert set(found["exact"]["speeds"].values()) == {1.0}


def test_each_allocator_serves_a_process_of_its_own(monkeypatch):
    environments, run = [], subprocess.run

    def recorded(command, **options):
        environments.append(options["env"])
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", recorded)
    entries = speed.PARTS["allocators"](True)
    if page_keeping.is_glibc():
        keeping, default = environments
        assert page_keeping.KEEPING.items() <= keeping.items()
        assert not page_keeping.KEEPING.keys() & default.keys()
        assert [entry["name"] for entry in entries] == list(speed_allocators.SHOWN)
    # At these sizes the default allocator may keep its pages too, so the counts of faults are not compared.
    measured = [entry[which] for entry in entries for which in ("keeping", "default")]
    assert all(each["faults"] >= 0 < each["speed"] for each in measured)
    record = {"settings": {"layer rows": 512}, "results": {"allocators": entries}}
    assert len(section(record, "allocators").table.rows) == len(entries)


def test_a_record_of_another_allocator_is_not_continued(counted, tmp_path, monkeypatch, capsys):
    assert bench("--quick", "--out", str(tmp_path)) == 0
    monkeypatch.setattr(speed, "allocator", lambda: "another")
    assert bench("--quick", "--out", str(tmp_path)) == 2
    assert "was made with other settings (quick, threads=1, allocator: " in capsys.readouterr().err

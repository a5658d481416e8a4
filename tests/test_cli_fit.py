"""backsketch fit: the answer first, the Python to paste last, and mistakes in one line."""

import json
import time

import pytest

from backsketch.cli import main
from cases import needs_shown_saves
from commands import check_mistake
from small import LENGTH, transformers

pytestmark = needs_shown_saves


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("tiny")
    config.save_pretrained(directory)
    return str(directory)


def test_the_table_the_record_and_the_picture(tiny, capsys, tmp_path):
    picture = tmp_path / "fit.png"
    arguments = [
        "fit",
        tiny,
        "--memory",
        "8MiB",
        "--seq",
        str(LENGTH),
        "--dtype",
        "bf16",
        "--lora",
        "4",
        "--ranks",
        "2",
    ]
    assert main([*arguments, "--json", "--plot", str(picture)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert picture.stat().st_size > 10_000
    assert (record["memory"], record["batch"], record["length"], record["ranks"]) == (8 * 2**20, 1, LENGTH, 2)
    assert record["dtype"] == "bfloat16"
    groups = list(dict.fromkeys(row["group"] for row in record["rows"]))
    assert groups == ["", "fused loss", "LoRA of rank 4", "LoRA of rank 4, fused loss"]
    whole, adapted = record["rows"][0], next(row for row in record["rows"] if row["group"].startswith("LoRA"))
    assert adapted["states"] < whole["states"] / 5
    assert all(row["peak"]["total"] == sum(row["peak"]["parts"].values()) for row in record["rows"])


def test_steps_are_timed_where_asked_and_nothing_that_fits_is_said(tiny, capsys):
    assert main(["fit", tiny, "--memory", "1MiB", "--seq", "16", "--measure"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("It does not fit as it is: ")
    assert "measured on this machine" in shown
    assert "What would help:" in shown
    assert "- --optimizer adamw8bit: the states" in shown
    assert "- --lora 16: weights" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "much"], "memory must be a size with a unit"),
        (["--memory", "24"], "memory must be a size with a unit"),
        (["--memory", "1GiB", "--seq", "33"], "seq must be at most 32, the positions that the model has, got 33"),
        (["--memory", "1GiB", "--optimizer", "adam"], "optimizer must be one of adamw, adamw8bit, sgd, got 'adam'"),
        (["--memory", "1GiB", "--ranks", "0"], "ranks must be a positive integer, got 0"),
        (["--memory", "1GiB", "--dtype", "int8"], "dtype must be one of"),
        (["--memory", "1GiB", "--wish", "luck"], "wish must be one of"),
        (["--memory", "1GiB", "--plot", "/nowhere/a.png"], "plot must be a file in a directory that exists"),
        (["--memory", "1GiB", "--plot", "a.colour"], "plot must end in one of"),
        (["--memory", "1GiB", "--plot", "colour"], "plot must end in one of"),
    ],
)
def test_mistakes_are_told_in_one_line(tiny, options, message, capsys):
    check_mistake(["fit", tiny, *options], message, capsys)


@pytest.mark.slow
def test_a_model_of_eight_billion_weights_takes_seconds(tmp_path, capsys):
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    start = time.process_time()
    assert main(["fit", str(tmp_path), "--memory", "80GiB", "--seq", "8192", "--dtype", "bf16"]) == 0
    seconds = time.process_time() - start
    with capsys.disabled():
        print(f"\nLlama-3-8B, 1 × 8192: {seconds:.1f} s of processor time")
    assert seconds < 20

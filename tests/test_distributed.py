"""DDP and FSDP2 over gloo, two processes started by torchrun: gradients, noise, precision, state, resuming."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "distributed.py"
CHECKS = (
    *("ddp", "ddp_compiled", "ddp_rest", "ddp_limit", "ddp_resume"),
    *("fsdp", "fsdp_measured", "fsdp_converted_after", "fsdp_rest", "fsdp_resume"),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run all checks in one pair of processes: starting them takes longer than the checks."""
    folder = tmp_path_factory.mktemp("distributed")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*launch, str(WORKER), ",".join(CHECKS), str(folder)], capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in CHECKS}


def is_unbiased(measured, rounding=1e-4):
    return measured["error"] > 0 and abs(measured["projection"] - 1) <= 5 * measured["error"] + rounding


@pytest.mark.parametrize("name", ["ddp", "ddp_compiled", "ddp_rest", "fsdp", "fsdp_converted_after", "fsdp_rest"])
def test_the_mean_gradient_of_two_ranks_is_the_exact_one_of_both_batches(outcomes, name):
    assert is_unbiased(outcomes[name]["mean"]), outcomes[name]


@pytest.mark.parametrize("name", ["ddp", "ddp_rest", "fsdp", "fsdp_rest"])
def test_the_noise_of_ranks_is_independent(outcomes, name):
    """Both ranks have the same batch and the same manual_seed; were S the same too, averaging would change nothing."""
    assert outcomes[name]["noise"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("name", ["ddp_rest", "fsdp_rest"])
def test_everything_else_is_packed_on_every_rank(outcomes, name):
    """The inputs of both layers and the slopes of GELU."""
    assert outcomes[name]["packed"] == 3


def test_the_mixed_precision_policy_of_fsdp(outcomes):
    assert is_unbiased(outcomes["fsdp"]["bf16"], rounding=0.01), outcomes["fsdp"]


def test_ranks_hold_a_limit_alike_though_one_measures_nan_and_a_budget_is_of_one_of_them(outcomes):
    limited = outcomes["ddp_limit"]
    assert limited["alike"]
    assert limited["finite"]
    assert limited["changes"] >= 1
    assert 0.9 < limited["kept"] <= 1


@pytest.mark.parametrize("name", ["ddp_resume", "fsdp_resume"])
def test_a_resumed_run_ends_with_the_same_weights(outcomes, name):
    assert outcomes[name]["same"]


@pytest.mark.parametrize("name", ["ddp_resume", "fsdp_resume"])
def test_a_state_dict_is_that_of_a_plain_model(outcomes, name):
    assert outcomes[name]["plain"]


def test_what_a_sharded_model_keeps_is_measured(outcomes):
    outcome = outcomes["fsdp_measured"]
    exact, sketched = outcome["kept"]
    assert 0 < sketched < exact
    assert outcome["planned"] == 2
    assert outcome["gathered"] == []
    assert 0 < outcome["reported"] < exact
    at_end, shards = outcome["weights"]
    assert at_end == shards  # those that were gathered are gone


def test_a_sharded_model_can_be_converted_and_restored(outcomes):
    outcome = outcomes["fsdp_converted_after"]
    assert outcome["sketched"] == ["SketchedLinear", "FSDPSketchedLinear"]
    assert outcome["restored"] == ["Linear", "FSDPLinear"]
    assert outcome["error"] < 1e-4


def test_unsketch_restores_the_layers_of_a_sharded_model(outcomes):
    assert outcomes["fsdp_resume"]["restored"]

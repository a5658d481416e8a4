"""A pretend accelerator with real values trains as the CPU's reference does, and is never waited for."""

import json
import math
from pathlib import Path

import pytest

from commands import python
from pretend_device import available

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not available, reason="this torch registers no device from Python")

WORKER = Path(__file__).parent / "workers" / "pretend_training.py"


@pytest.fixture(scope="module")
def measured():
    run = python("-W", "ignore", str(WORKER))
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_what_a_layer_keeps_is_that_of_the_reference_bit_for_bit(measured):
    assert len(measured["layers"]) == 14
    for name, found in measured["layers"].items():
        assert len(found["kept"]) >= 3, name
        assert all(found["kept"]), name
        assert found["calls"] > 20, name


def test_gradients_of_a_layer_are_those_of_the_reference(measured):
    for name, found in measured["layers"].items():
        out, grad_x, grad_weight, grad_bias = found["errors"]
        assert out == grad_x == grad_bias == 0, name
        assert grad_weight < (2e-3 if "16" in name or "rotated" in name else 2e-6), name


def test_no_layer_reads_a_value_back(measured):
    assert all(not found["reads"] for found in measured["layers"].values())


def test_models_train_as_on_the_cpu(measured):
    for name, found in measured["models"].items():
        losses, device_losses = found["losses"]
        assert device_losses == pytest.approx(losses, rel=1e-4 if "autocast" in name else 1e-5), name
        assert found["error"] < (2e-3 if "autocast" in name else 1e-5), name


def test_models_read_back_what_exact_ones_do(measured):
    for name, found in measured["models"].items():
        exact, converted = found["reads"]
        assert converted == exact, name
        assert len(exact) <= 2, name  # transformers asks once a step whether a mask leaves anything out


def test_the_same_bytes_are_kept(measured):
    for name, found in measured["models"].items():
        host, device = found["kept"]
        if "dropout" not in name:  # whose mask an accelerator has in flags, and a CPU in numbers
            assert host == device, name
        assert min(device) > 0
    (host_before, host_after, *_), device, meta = measured["profiles"]
    assert device == meta
    assert device[:2] == [host_before, host_after]


def test_a_monitor_finds_the_same_noise(measured):
    host, device = measured["models"]["all, monitored"]["variances"]
    assert len(device) > 10
    assert device == pytest.approx(host, rel=1e-4, nan_ok=True)
    assert not all(map(math.isnan, device))


def test_a_broken_promise_is_told_without_pinned_memory(measured):
    assert any("rows that the mask leaves out get a gradient" in told for told in measured["told"])


def test_a_device_without_autocast_is_monitored(measured):
    assert measured["without amp"] == 1

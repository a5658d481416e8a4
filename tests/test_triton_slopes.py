"""The Triton kernels of slopes do what the reference does, in Triton's interpreter, and compile without a spill."""

import itertools
import json
from pathlib import Path

import pytest

from commands import python
from gpu_compiler import compile_for, resources

triton = pytest.importorskip("triton", reason="Triton is not installed")

WORKER = Path(__file__).parent / "workers" / "triton_slopes_interpreter.py"


@pytest.fixture(scope="module")
def measured():
    run = python("-W", "ignore", str(WORKER), TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_cases_are_many_and_different(measured):
    cases = [each["case"] for each in measured["cases"]]
    assert len(cases) == 4 * 10 + 5
    functions = {case[0] for case in cases}
    assert functions == {"gelu", "gelu tanh", "silu", "sigmoid", "tanh", "mish"}
    assert len({(case[0], case[3]) for case in cases}) > 14
    assert sum(each["codes"] for each in measured["cases"]) > 200_000


def test_codes_are_those_of_the_reference(measured):
    cases = measured["cases"]
    assert all(each["shapes"] for each in cases)
    assert max(each["levels"] for each in cases) <= 1
    assert sum(each["codes differ"] for each in cases) <= sum(each["codes"] for each in cases) / 1e4


def test_products_are_those_of_the_reference(measured):
    for each in measured["cases"]:
        assert each["error"] <= 1, each


def test_what_is_not_finite_leaves_its_neighbours_alone(measured):
    assert measured["not finite"]


def test_nothing_to_store(measured):
    assert measured["empty"] == [[0], [3, 0]]


TYPES = {"codes": "*u8", "line": "*i64", "slope": "i64", "offset": "i64", "count": "i32"}
TYPES |= dict.fromkeys(("low", "per_step", "step", "base"), "fp32")
POINTERS = ("x", "grad", "out", "codes", "line")


def compiled(kernel, capability, dtype, constants, **options):
    from backsketch.storage.triton_slopes_launch import ROWS, WARPS

    types = TYPES | dict.fromkeys(("x", "grad", "out"), f"*{dtype}")
    options = {"num_warps": WARPS, "enable_fp_fusion": False} | options
    return compile_for(kernel, capability, types, {"ROWS": ROWS} | constants, POINTERS, **options)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus_and_spill_nothing(capability, tmp_path, monkeypatch, capsys):
    from backsketch.storage.triton_slopes import pack_slopes_kernel, times_slopes_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    lines = [f"sm_{capability}: registers of a thread; spilled bytes"]
    for dtype, bits in itertools.product(("fp32", "bf16", "fp16"), (8, 4, 3, 2)):
        forms = [(pack_slopes_kernel, {"FUNCTION": function}) for function in range(6)] + [(times_slopes_kernel, {})]
        found = [
            resources(compiled(kernel, capability, dtype, {"BITS": bits, "line": None, **form}), tmp_path)
            for kernel, form in forms
        ]
        lines.append(f"{dtype} {bits} " + " ".join(f"{registers};{spilled}" for registers, spilled in found))
        assert not any(spilled for _, spilled in found), lines[-1]
    for kernel, form in ((pack_slopes_kernel, {"FUNCTION": 1}), (times_slopes_kernel, {})):
        registers, spilled = resources(compiled(kernel, capability, "fp32", {"BITS": 3, **form}), tmp_path)
        lines.append(f"a line on the device: {kernel.fn.__name__} {registers};{spilled}")
        assert not spilled
    with capsys.disabled():
        print("\n" + "\n".join(lines))

"""The Triton kernels do what the reference does, in Triton's interpreter, and compile for GPUs without a spill."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from commands import python
from gpu_compiler import compile_for, resources

triton = pytest.importorskip("triton", reason="Triton is not installed")

WORKER = Path(__file__).parent / "workers" / "triton_interpreter.py"


@pytest.fixture(scope="module")
def measured():
    run = python("-W", "ignore", str(WORKER), TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def total(measured, name, *, rotated):
    return sum(each[name] for each in measured["cases"] if each["case"]["rotated"] in rotated)


def test_the_cases_are_many_and_different(measured):
    cases = [each["case"] for each in measured["cases"]]
    assert len(cases) == 4 * 2 * 7
    assert len({pair for case in cases for pair in itertools.combinations(case.items(), 2)}) > 800
    assert total(measured, "codes", rotated=[False]) > 90_000
    assert total(measured, "codes", rotated=[True]) > 90_000
    assert total(measured, "not finite", rotated=[False, True]) > 1000


def test_dither_is_that_of_the_reference_bit_for_bit(measured):
    assert measured["dither"]["differ"] == 0
    assert measured["dither"]["different"] > 0.9 * measured["dither"]["numbers"] > 5000


def test_ranges_are_those_of_the_reference(measured):
    assert total(measured, "ranges differ", rotated=[False]) == 0
    assert total(measured, "ranges differ", rotated=[True]) <= total(measured, "ranges", rotated=[True]) / 1000
    assert max(each["range steps"] for each in measured["cases"]) <= 1


def test_codes_are_those_of_the_reference(measured):
    assert (
        total(measured, "codes differ", rotated=[False, True]) <= total(measured, "codes", rotated=[False, True]) / 1e4
    )
    assert max(each["levels"] for each in measured["cases"]) <= 1
    assert all(each["untouched"] for each in measured["cases"])


def test_values_come_back_as_from_the_reference(measured):
    for each in measured["cases"]:
        assert each["shape"], each
        assert each["finite"], each
        assert each["error"] < 8, each


def test_no_rows_and_no_features(measured):
    assert measured["empty"] == [[0, 128], [3, 0]]


# Compiled for GPUs that are not here

POINTERS = {"x", "chosen", "mean", "codes", "ranges", "line", "matrix", "places", "out"}
TYPES = {"chosen": "*i64", "places": "*i64", "line": "*i64", "codes": "*u8", "ranges": "*i16", "matrix": "*fp32"}
TYPES |= {"slope": "i64", "offset": "i64", "scale": "fp32"}


def compiled(kernel, capability, dtype, constants, **options):
    """Compile a kernel as a launch does; strides are multiples of 16 if all groups are full."""
    from backsketch.storage.triton_launch import PACK_REGISTERS, ROWS, WARPS

    constants = {"ROWS": ROWS, **constants}
    types = {name: TYPES.get(name, f"*{dtype}" if name in POINTERS else "i32") for name in kernel.arg_names}
    strides = {name for name in kernel.arg_names if name.endswith("_stride") and name != "ranges_stride"}
    aligned = POINTERS if constants["REST"] else POINTERS | strides
    usual = {"num_warps": WARPS, "enable_fp_fusion": False}
    if kernel.fn.__name__ == "pack_kernel" and "matrix" in constants:
        usual["maxnreg"] = PACK_REGISTERS
    return compile_for(kernel, capability, types, constants, aligned, **(usual | options))


def pack_constants(bits, rotated, rest=0, **others):
    return {"BITS": bits, "ROTATED": rotated, "REST": rest, "line": None, "x_column_stride": 1, "matrix": None} | others


def unpack_constants(bits, rotated, rest=0, **others):
    return {"BITS": bits, "ROTATED": rotated, "TURN": rotated, "REST": rest, "line": None, "matrix": None} | others


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus_and_spill_nothing(capability, cache, capsys):
    from backsketch.storage.triton_kernels import pack_kernel, unpack_kernel

    lines = [f"sm_{capability}: registers of a thread; spilled bytes", "kernel type bits plain rotated"]
    for kernel, constants in ((pack_kernel, pack_constants), (unpack_kernel, unpack_constants)):
        for dtype in ("fp32", "bf16"):
            for bits in (8, 4, 3, 2):
                found = [
                    resources(compiled(kernel, capability, dtype, constants(bits, rotated)), cache)
                    for rotated in (False, True)
                ]
                shown = " ".join(f"{registers};{spilled}" for registers, spilled in found)
                lines.append(f"{kernel.fn.__name__} {dtype} {bits} {shown}")
                assert not any(spilled for _, spilled in found), lines[-1]
    with capsys.disabled():
        print("\n" + "\n".join(lines))


OTHERS: dict[str, dict[str, Any]] = {
    "half a group": {"REST": 64},
    "by a matrix": {"REST": 44, "matrix": ...},
    "few values": {"REST": 5, "matrix": ...},
    "a line on the device": {"line": ...},
    "rows as they are": {"chosen": None, "mean": None, "places": None},
    "transposed": {"x_row_stride": 1, "x_column_stride": ...},
}


@pytest.mark.slow
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", OTHERS)
def test_other_forms_of_the_kernels_compile_and_spill_nothing(name, capability, rotated, cache, capsys):
    from backsketch.storage.triton_kernels import pack_kernel, unpack_kernel

    if not rotated and "matrix" in OTHERS[name]:
        pytest.skip("no matrix without rotation")
    for kernel, constants in ((pack_kernel, pack_constants), (unpack_kernel, unpack_constants)):
        own = {key: value for key, value in OTHERS[name].items() if key in kernel.arg_names}
        known = {key: value for key, value in (constants(3, rotated) | own).items() if value is not ...}
        registers, spilled = resources(compiled(kernel, capability, "fp16", known), cache)
        with capsys.disabled():
            print(f"\n{name}, sm_{capability}, rotated {rotated}: {kernel.fn.__name__} {registers};{spilled}", end="")
        assert not spilled


@pytest.mark.slow
def test_a_spill_would_be_seen(cache):
    from backsketch.storage.triton_kernels import pack_kernel

    kernel = compiled(pack_kernel, 80, "fp32", pack_constants(3, True), maxnreg=32)
    registers, spilled = resources(kernel, cache)
    assert registers <= 32
    assert spilled

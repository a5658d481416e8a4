"""SketchConfig: sizes, clamps, and what it refuses."""

import dataclasses
import math
import pickle

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backsketch import SKETCHES, SketchConfig
from backsketch.config import ROUNDING_NOISE
from backsketch.linear.keeping import kept_bytes


def test_defaults_are_plain():
    assert dataclasses.asdict(SketchConfig()) == {
        "kind": "rows",
        "ratio": None,
        "dim": None,
        "min_dim": 1,
        "max_dim": None,
        "block": None,
        "bits": None,
        "rotate": False,
        "center": False,
    }


def test_is_keyword_only_frozen_hashable_and_picklable():
    with pytest.raises(TypeError):
        SketchConfig("rows")  # type: ignore[call-arg]
    config = SketchConfig(ratio=0.5, block=128)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ratio = 0.2  # type: ignore[misc]
    assert hash(config) == hash(SketchConfig(ratio=0.5, block=128))
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("config", "rows", "dim"),
    [
        (SketchConfig(), 1000, 100),
        (SketchConfig(ratio=0.5), 7, 4),
        (SketchConfig(ratio=0.1), 4, 1),
        (SketchConfig(ratio=0.1), 0, 0),
        (SketchConfig(ratio=0.1), 1, 1),
        (SketchConfig(ratio=1), 33, 33),
        (SketchConfig(dim=64), 1000, 64),
        (SketchConfig(dim=64), 10, 10),
        (SketchConfig(ratio=0.1, min_dim=32), 100, 32),
        (SketchConfig(ratio=0.1, min_dim=32), 20, 20),
        (SketchConfig(ratio=0.5, max_dim=32), 100, 32),
        (SketchConfig(dim=64, max_dim=32), 100, 32),
        (SketchConfig(dim=4, min_dim=8), 100, 8),
        (SketchConfig(ratio=0.1, block=128), 1000, 100),
    ],
)
def test_dim_for(config, rows, dim):
    assert config.dim_for(rows) == dim


@given(st.floats(1e-6, 1.0), st.integers(1, 10**6), st.integers(1, 10**4))
def test_dim_is_never_zero_and_never_above_the_rows(ratio, rows, min_dim):
    dim = SketchConfig(ratio=ratio, min_dim=min_dim).dim_for(rows)
    assert min(min_dim, rows) <= dim <= rows
    assert dim == min(max(round(ratio * rows), min_dim), rows)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"ratio": 0}, ValueError, ["ratio", "(0, 1]", "0"]),
        ({"ratio": -1}, ValueError, ["ratio", "(0, 1]", "-1"]),
        ({"ratio": 1.5}, ValueError, ["ratio", "(0, 1]", "1.5"]),
        ({"ratio": math.nan}, ValueError, ["ratio", "(0, 1]", "nan"]),
        ({"ratio": "0.1"}, TypeError, ["ratio", "number", "'0.1'"]),
        ({"ratio": True}, TypeError, ["ratio", "True"]),
        ({"dim": 0}, ValueError, ["dim", "positive integer", "0"]),
        ({"dim": 2.0}, TypeError, ["dim", "positive integer", "2.0"]),
        ({"min_dim": 0}, ValueError, ["min_dim", "0"]),
        ({"min_dim": None}, TypeError, ["min_dim", "None"]),
        ({"min_dim": 9, "max_dim": 8}, ValueError, ["min_dim", "max_dim", "9", "8"]),
        ({"kind": "gauss"}, ValueError, ["kind", "'gauss'", *SKETCHES]),
        ({"kind": None}, TypeError, ["kind", "None"]),
        ({"ratio": 0.1, "dim": 8}, ValueError, ["ratio", "dim", "0.1", "8"]),
        ({"block": 0}, ValueError, ["block", "positive integer", "0"]),
        ({"block": -128}, ValueError, ["block", "-128"]),
        ({"block": 12.5}, TypeError, ["block", "12.5"]),
        ({"block": "128"}, TypeError, ["block", "'128'"]),
        ({"bits": 5}, ValueError, ["bits", "5", "8"]),
        ({"rotate": True}, ValueError, ["rotate=True", "bits"]),
        ({"bits": 4, "rotate": 1}, TypeError, ["rotate", "1"]),
        ({"bits": True}, ValueError, ["bits", "True"]),
        ({"bits": 4.0}, ValueError, ["bits", "4.0"]),
        ({"center": 1}, TypeError, ["center", "1"]),
    ],
)
def test_bad_values_name_the_argument_the_value_and_what_is_allowed(arguments, error, words):
    with pytest.raises(error) as caught:
        SketchConfig(**arguments)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("keep", [0.01, 0.05, 0.08, 0.1, 0.125, 0.14, 0.2, 0.25, 0.27, 0.5, 0.99])
def test_recommended_keeps_no_more_than_asked_of_the_inputs_own_bytes(keep, dtype):
    config = SketchConfig.recommended(keep, dtype)
    assert kept_bytes(config, 10_000, 768, dtype.itemsize) <= keep * 10_000 * 768 * dtype.itemsize * 1.001


def test_recommended_takes_all_rows_where_they_fit():
    assert SketchConfig.recommended(1.0) == SketchConfig(ratio=1.0)
    for keep, bits in ((0.3, 8), (0.15, 4), (0.102, 3), (0.075, 2)):
        assert SketchConfig.recommended(keep) == SketchConfig(ratio=1.0, bits=bits, rotate=True)
    assert SketchConfig.recommended(0.15, torch.bfloat16) == SketchConfig(ratio=1.0, bits=2, rotate=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_noise_of_recommended_never_rises_with_what_it_keeps(dtype):
    configs = [SketchConfig.recommended(step / 500, dtype) for step in range(1, 500)]
    noise = [(1 + ROUNDING_NOISE[config.bits or 8, True]) / (config.ratio or 1) - 1 for config in configs]
    sizes = [kept_bytes(config, 10_000, 768, dtype.itemsize) for config in configs]
    assert noise == sorted(noise, reverse=True)
    assert sizes == sorted(sizes)


def test_recommended_refuses_what_is_not_a_share():
    with pytest.raises(ValueError, match="keep must be in"):
        SketchConfig.recommended(keep=0)
    with pytest.raises(TypeError, match="dtype must be a floating-point"):
        SketchConfig.recommended(dtype=torch.int8)


def test_numbers_of_other_libraries_become_plain_ones():
    """They go into JSON records and into compiled graphs, which take plain numbers alone."""
    config = SketchConfig(ratio=numpy.float32(0.5), bits=numpy.int64(4), block=numpy.int32(8))
    assert [type(value) for value in (config.ratio, config.bits, config.block)] == [float, int, int]


def test_reads_well():
    assert str(SketchConfig()) == "rows, ratio=0.1"
    assert str(SketchConfig(kind="hadamard", dim=64, block=128)) == "hadamard, dim=64, block=128"

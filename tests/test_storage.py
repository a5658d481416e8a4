"""Few-bit storage: unbiased, tight, and honest about what cannot be stored."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backsketch.sketches.cosine import Cosine
from backsketch.sketches.fourier import Fourier
from backsketch.sketches.hadamard import Hadamard
from backsketch.storage.packing import GROUP, _column_dither, pack, rounding_variance, stored_bytes, unpack
from cases import within_five_standard_errors


def roundtrip(x, bits, seed=0, scale=1.0):
    codes, ranges = pack(x, bits, torch.Generator().manual_seed(seed))
    return unpack(codes, ranges, bits, x.shape[1], x.dtype, scale) / scale


@pytest.mark.parametrize("features", [1, 5, 128, 130, 300])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rounding_is_unbiased_and_within_one_step(bits, features):
    x = torch.randn(6, features) * torch.logspace(-3, 3, 6).unsqueeze(1)
    samples = torch.stack([roundtrip(x, bits, seed) for seed in range(500)])
    step = torch.stack([part.amax(1) - part.amin(1) for part in x.split(GROUP, 1)], 1) / (2**bits - 1)
    step = step.repeat_interleave(GROUP, 1)[:, :features]
    assert ((samples - x).abs() <= step * 1.001 + 1e-6).all()
    scaled = (samples - x) / step.clamp(min=1e-9)
    assert within_five_standard_errors(
        scaled, 0.0, rounding=5 / 500
    )  # a value near a level rounds away a few times in 500


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_roundings_in_different_rows_are_uncorrelated_and_of_binomial_variance(bits):
    x = torch.randn(4, 64, dtype=torch.float64)
    _, ranges = pack(x, bits, torch.Generator().manual_seed(0))
    step = ranges[:, 0, 1:]
    fraction = ((x - ranges[:, 0, :1]) / step).frac()
    errors = torch.stack([roundtrip(x, bits, seed) - x for seed in range(3000)]) / step
    assert within_five_standard_errors(errors.square(), fraction * (1 - fraction), rounding=1e-3)
    for shift in (1, 2, 3):
        assert within_five_standard_errors(errors * errors.roll(shift, dims=1), 0.0, rounding=1e-3)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rounding_variance_is_what_rounding_adds(bits):
    x = torch.randn(4, 150, dtype=torch.float64)
    samples = torch.stack([(roundtrip(x, bits, seed) - x).square().sum(1) for seed in range(1000)])
    assert within_five_standard_errors(samples, rounding_variance(x, bits))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_constant_groups_are_exact_and_two_valued_ones_nearly(bits):
    constant = torch.full((3, 200), 7.25)
    assert torch.equal(roundtrip(constant, bits), constant)
    assert not roundtrip(torch.zeros(3, 200), bits).any()
    two = torch.tensor([-1.5, 4.0])[torch.randint(0, 2, (3, 200))]
    torch.testing.assert_close(roundtrip(two, bits), two)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_group_that_is_not_finite_comes_back_not_finite_and_alone(bits, value):
    x = torch.randn(3, 4 * GROUP)
    x[1, GROUP + 5] = value
    out = roundtrip(x, bits)
    assert not out[1, GROUP + 5].isfinite()
    out[1, GROUP : 2 * GROUP] = x[1, GROUP : 2 * GROUP] = 0
    assert out.isfinite().all()
    assert (out - x).abs().max() <= (x.amax() - x.amin()) / (2**bits - 1)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_huge_and_tiny_ranges_stay_finite(bits):
    sign = torch.randint(0, 2, (2, 200)) * 2.0 - 1
    assert torch.allclose(roundtrip(sign * 3e38, bits, scale=0.5), sign * 3e38)
    assert (roundtrip(sign * 1e-42, bits, scale=0.5).abs() <= 1.1e-42).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_chosen_rows_are_stored_as_if_they_were_all(bits, monkeypatch):
    monkeypatch.setattr("backsketch.numerics.CHUNK_ELEMENTS", 400)  # several slabs
    x, chosen = torch.randn(9, 150), torch.tensor([7, 0, 3, 8, 1])
    stored = pack(x, bits, torch.Generator().manual_seed(1), chosen)
    for part, alike in zip(stored, pack(x[chosen], bits, torch.Generator().manual_seed(1)), strict=True):
        assert torch.equal(part, alike)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [None, 8, 4, 2])
def test_bytes(bits, dtype):
    x = torch.randn(9, 300, dtype=dtype)
    stored = (x,) if bits is None else pack(x, bits, torch.Generator())
    assert sum(part.nbytes for part in stored) == stored_bytes(9, 300, bits, dtype.itemsize)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_nothing_to_store(bits):
    assert roundtrip(torch.empty(0, 5), bits).shape == (0, 5)
    assert roundtrip(torch.empty(3, 0), bits).shape == (3, 0)


def test_nothing_is_in_fp64_on_the_device():
    """MPS has no fp64; meta stands in for it here."""
    meta, wide = torch.device("meta"), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_meta and out.dtype == torch.float64:
                wide.append(function)
            return out

    with Watch():
        assert _column_dither.__wrapped__(2, meta, torch.float32).device == meta
        for kind in (Cosine, Fourier, Hadamard):
            assert kind.matrix(8, meta).device == meta
    assert not wide

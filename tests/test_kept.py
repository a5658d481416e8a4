"""What is kept: every kind × bits × center × mask gives an unbiased gradient, and keeps the bytes it says."""

import itertools

import pytest
import torch

from backsketch import SketchConfig, peak_memory
from backsketch.linear.keeping import keep, kept_bytes
from backsketch.linear.weight_gradient import weight_gradient
from backsketch.seeds import draw_seed
from backsketch.sketches import make_sketch
from cases import FORMS, within_five_standard_errors

ROWS, FEATURES, OUTPUTS = 26, 7, 5
CASES = [
    SketchConfig(kind=kind, block=block, ratio=ratio, bits=bits, rotate=rotate, center=center)
    for (kind, block), (bits, rotate), center, ratio in itertools.product(
        FORMS, ((None, False), (8, False), (4, True), (3, False), (2, True)), (False, True), (0.3, 1.0)
    )
    if ratio < 1 or (kind == "rows" and block is None)
]
STORAGES = [(bits, rotate) for bits in (8, 4, 3, 2) for rotate in (False, True)]


def data(rows=ROWS, dtype=torch.float32):
    x = torch.randn(rows, FEATURES) + torch.linspace(-2, 2, FEATURES)
    y = torch.randn(rows, OUTPUTS)
    valid = torch.rand(rows) < 0.6
    return x.to(dtype), (y * valid.unsqueeze(1)).to(dtype), valid


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("config", CASES, ids=str)
def test_gradient_is_unbiased(config, masked):
    x, y, valid = data()
    valid = valid if masked else None
    samples = [weight_gradient(keep(x, config, draw_seed(), valid), y, config, FEATURES, valid) for _ in range(120)]
    assert within_five_standard_errors(torch.stack(samples), (y.t() @ x).double(), rounding=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "rotate"), STORAGES)
@pytest.mark.parametrize("features", [FEATURES, 300])
def test_gradient_is_unbiased_in_every_dtype_and_storage(bits, rotate, dtype, features):
    """300 features are two full groups and a shorter one; more outputs than rows, so that rows are rotated back."""
    config = SketchConfig(ratio=0.5, bits=bits, rotate=rotate, center=True)
    x = (torch.randn(ROWS, features) + torch.linspace(-2, 2, features)).to(dtype)
    y = torch.randn(ROWS, OUTPUTS if features == FEATURES else 40).to(dtype)
    samples = [weight_gradient(keep(x, config, draw_seed()), y, config, features) for _ in range(120)]
    assert samples[0].dtype == dtype
    exact = y.double().t() @ x.double()
    rounding = 3 * torch.finfo(dtype).eps * float(exact.abs().max())
    assert within_five_standard_errors(torch.stack(samples), exact, rounding)


@pytest.mark.parametrize("config", [config for config in CASES if config.block is None], ids=str)
def test_bytes_kept_are_those_announced(config):
    for dtype, features in itertools.product((torch.float64, torch.float32, torch.bfloat16), (1, 3, 128, 200, 768)):
        kept = keep(torch.randn(40, features, dtype=dtype), config, draw_seed())
        size = sum(tensor.untyped_storage().nbytes() for tensor in kept)
        assert size == kept_bytes(config, 40, features, dtype.itemsize), (dtype, features)


@pytest.mark.parametrize("kind", ["rows", "gaussian", "hash", "hadamard"])
@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
def test_masked_rows_never_reach_what_is_kept(kind, garbage):
    x, _, valid = data()
    config = SketchConfig(kind=kind, ratio=0.5, bits=4, center=True)
    outcomes = []
    for fill in (0.0, garbage):
        torch.manual_seed(1)
        outcomes.append(keep(x.masked_fill(~valid.unsqueeze(1), fill), config, draw_seed(), valid))
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
def test_masked_rows_in_few_bits_never_reach_the_gradient(ratio, garbage):
    x, y, valid = data()
    config = SketchConfig(ratio=ratio, bits=4)
    outcomes = []
    for fill in (0.0, garbage):
        kept = keep(x.masked_fill(~valid.unsqueeze(1), fill), config, torch.tensor(1), valid)
        outcomes.append(weight_gradient(kept, y, config, FEATURES, valid))
    assert outcomes[0].isfinite().all()
    assert torch.equal(*outcomes)


@pytest.mark.parametrize("count", [0, 1, 5, ROWS])
def test_rows_with_few_valid_ones_are_kept_exactly(count):
    x, y, _ = data()
    valid = torch.arange(ROWS) < count
    y = torch.randn(ROWS, OUTPUTS) * valid.unsqueeze(1)
    config = SketchConfig(dim=max(count, 5))
    gradient = weight_gradient(keep(x, config, draw_seed(), valid), y, config, FEATURES, valid)
    torch.testing.assert_close(gradient, y.t() @ x)


def test_the_dither_is_drawn_from_the_seed():
    x, _, _ = data()
    config = SketchConfig(ratio=1.0, bits=2)
    torch.manual_seed(3)
    first = keep(x, config, draw_seed())
    torch.manual_seed(3)
    again = keep(x, config, draw_seed())
    other = keep(x, config, draw_seed())
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[1], other[1])


def test_center_keeps_the_mean_row_exactly():
    x = torch.randn(1, FEATURES).expand(ROWS, FEATURES) * 100
    y = torch.randn(ROWS, OUTPUTS)
    for kind, block in FORMS:
        config = SketchConfig(kind=kind, block=block, ratio=0.2, center=True)
        gradient = weight_gradient(keep(x, config, draw_seed()), y, config, FEATURES)
        torch.testing.assert_close(gradient, y.t() @ x, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("config", CASES, ids=str)
def test_an_empty_batch_has_a_zero_gradient(config):
    x, y = torch.randn(0, FEATURES), torch.randn(0, OUTPUTS)
    for valid in (None, torch.zeros(0, dtype=torch.bool)):
        gradient = weight_gradient(keep(x, config, draw_seed(), valid), y, config, FEATURES, valid)
        assert torch.equal(gradient, torch.zeros(OUTPUTS, FEATURES))


def test_a_mean_that_half_precision_rounds_is_the_same_in_both_passes():
    """Taking off a rounded mean and adding the exact one would shift every gradient the same way."""
    x = (torch.randn(64, 3) * 0.01 + 1.002).bfloat16()
    _, rows, mean = keep(x, SketchConfig(ratio=0.5, center=True), torch.tensor(1))
    chosen = make_sketch("rows", 64, 32, 1).compress(x)
    assert mean.dtype == x.dtype
    assert torch.equal(rows + mean, chosen)


def test_the_default_dtype_does_not_matter():
    x = torch.randn(30, FEATURES)
    valid = torch.arange(30) < 20
    for kind, block in FORMS:
        outcomes = []
        for default in (torch.float32, torch.bfloat16):
            torch.set_default_dtype(default)
            try:
                config = SketchConfig(kind=kind, block=block, ratio=0.4)
                outcomes.append(weight_gradient(keep(x, config, torch.tensor(5), valid), x, config, FEATURES, valid))
            finally:
                torch.set_default_dtype(torch.float32)
        assert torch.equal(*outcomes), kind


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_values_far_apart_give_a_finite_gradient_and_further_apart_than_floats_go_none(bits):
    config = SketchConfig(ratio=1.0, bits=bits)
    signs = torch.randint(0, 2, (6, 200)) * 2.0 - 1
    found = weight_gradient(keep(signs * 1e38, config, draw_seed()), torch.eye(6), config, 200)
    assert (found - signs * 1e38).abs().max() <= 2.02e38 / (2**bits - 1) / 2
    found = weight_gradient(keep(signs * 3e38, config, draw_seed()), torch.eye(6), config, 200)
    assert not found.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slabs_of_packed_rows_add_up(dtype, monkeypatch):
    config = SketchConfig(ratio=0.8, bits=8)
    x, y, _ = data(dtype=dtype)
    kept = keep(x, config, draw_seed())
    whole = weight_gradient(kept, y, config, FEATURES)
    monkeypatch.setattr("backsketch.linear.weight_gradient._LEAST_READ", 6)
    torch.testing.assert_close(weight_gradient(kept, y, config, FEATURES), whole)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ratio", [0.7, 1.0])
def test_rows_are_packed_without_a_copy_of_all_of_them(ratio, masked):
    x, config = torch.randn(16384, 256), SketchConfig(ratio=ratio, bits=4)
    valid = torch.rand(16384) < 0.8 if masked else None
    with peak_memory() as peak:
        kept = keep(x, config, torch.tensor(1), valid)
    beyond = peak.total - x.nbytes - sum(tensor.nbytes for tensor in kept)
    assert 0 <= beyond < x.nbytes * 0.4

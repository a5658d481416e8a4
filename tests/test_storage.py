"""Few-bit storage: unbiased, tight, and honest about what cannot be stored."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backsketch import cpu_library
from backsketch.noise.rounding import rounding_variance
from backsketch.sketches.cosine import Cosine
from backsketch.sketches.fourier import Fourier
from backsketch.sketches.hadamard import Hadamard
from backsketch.storage import cpu_kernel
from backsketch.storage.codes import group_bytes, join, split
from backsketch.storage.groups import GROUP
from backsketch.storage.packing import read, without_fused_kernels, write
from backsketch.storage.ranges import Grid
from backsketch.storage.rotation import _signs, rotate, rotate_back, transform_matrix
from backsketch.storage.sizes import stored_bytes
from backsketch.storage.stored_rows import StoredRows
from cases import within_five_standard_errors

WIDTHS = pytest.mark.parametrize("bits", [8, 4, 3, 2])
ROTATED = pytest.mark.parametrize("rotated", [False, True])


@pytest.fixture(autouse=True, params=["reference", "fused"])
def _kernels(request, monkeypatch):
    """Every law holds for the reference and for the kernel of this CPU, which takes rows of fp32 and bf16."""
    if request.param == "reference":
        with without_fused_kernels():
            yield
        return
    if cpu_library.why_not() is not None:
        pytest.skip(f"no kernel: {cpu_library.why_not()}")
    monkeypatch.setattr(cpu_kernel, "_LEAST_VALUES", 1)
    yield


def stored(x, bits, rotated=False, seed=0, **options):
    rows = len(options.get("chosen", x))
    found = StoredRows.empty(x, rows, x.shape[1], bits, rotated, seed)
    write(found, x, **options)
    return found


def roundtrip(x, bits, rotated=False, seed=0, scale=1.0):
    return read(stored(x, bits, rotated, seed), slice(None), x.dtype, scale=scale) / scale


def steps_of(x, bits, rotated):
    """Return the step of each value's group."""
    parts = [rotate(part) if rotated else part for part in x.split(GROUP, 1)]
    grids = [Grid.of(part.unsqueeze(1), bits, may_keep_zeros=not rotated).step.squeeze(1) for part in parts]
    return torch.cat([step.expand_as(part) for step, part in zip(grids, parts, strict=True)], 1)


@pytest.mark.parametrize("features", [1, 5, 128, 130, 300])
@ROTATED
@WIDTHS
def test_rounding_is_unbiased_and_within_half_a_step(bits, rotated, features):
    x = torch.randn(6, features) * torch.logspace(-3, 3, 6).unsqueeze(1)
    samples = torch.stack([roundtrip(x, bits, rotated, seed) for seed in range(500)])
    step = steps_of(x, bits, rotated)
    if not rotated:
        assert ((samples - x).abs() <= step * 0.5001 + 1e-6 * x.abs()).all()
    assert within_five_standard_errors((samples - x) / step.clamp(min=1e-9), 0.0, rounding=1e-3)


@ROTATED
@WIDTHS
def test_the_error_is_uniform_whatever_the_value_and_independent_between_rows(bits, rotated):
    x = torch.cat((torch.randn(4, 96), torch.zeros(4, 16), torch.full((4, 16), 0.25)), 1).double()
    rows = stored(x, bits, rotated)
    step = rows.ranges[:, 0, 1:].double()
    target = rotate(x) if rotated else x
    errors = []
    for seed in range(3000):
        rows = stored(x, bits, rotated, seed)
        errors.append(read(rows, slice(None), x.dtype, rotate_rows_back=False) - target)
    scaled = torch.stack(errors) / step
    assert scaled.abs().max() <= 0.5001
    assert within_five_standard_errors(scaled.square(), 1 / 12, rounding=1e-4)
    assert within_five_standard_errors(scaled.pow(4), 1 / 80, rounding=1e-4)  # uniform, not only of its variance
    for shift in (1, 2, 3):
        assert within_five_standard_errors(scaled * scaled.roll(shift, dims=1), 0.0, rounding=1e-3)


@pytest.mark.parametrize("zeros", [0.0, 0.7])
@ROTATED
@WIDTHS
def test_rounding_variance_is_what_rounding_adds(bits, rotated, zeros):
    x = torch.randn(4, 150, dtype=torch.float64).abs()
    x[torch.rand(4, 150) < zeros] = 0
    samples = torch.stack([(roundtrip(x, bits, rotated, seed) - x).square().sum(1) for seed in range(1000)])
    assert within_five_standard_errors(samples, rounding_variance(x, bits, rotated))


@WIDTHS
def test_zeros_by_nature_stay_exactly_zero(bits):
    """After ReLU, where that lowers the noise; single ones, as a mask leaves, where bits suffice."""
    x = torch.randn(8, 384).relu() * (torch.rand(8, 384) < 0.5)
    found = roundtrip(x, bits)
    assert not found[x == 0].any()
    levels = 2**bits - 1
    few = torch.rand(8, 384)
    few[:, ::100] = 0  # hardly a zero
    assert stored(few, bits).ranges[..., 1].signbit().all() == (bits >= 4)
    assert roundtrip(few, bits)[:, ::100].any() == (bits < 4)
    gain = rounding_variance(x, bits).sum() / (x.numel() * (x.amax(1).mean() / levels) ** 2 / 12)
    assert gain < 0.8


@WIDTHS
def test_constant_groups_are_nearly_exact_and_zero_is_exact(bits):
    assert torch.equal(roundtrip(torch.full((3, 200), 7.25), bits), torch.full((3, 200), 7.25))
    constant = torch.full((3, 200), 7.2531)
    assert (roundtrip(constant, bits) - constant).abs().max() <= 7.26 * 2**-8 / (2**bits - 1)
    for rotated in (False, True):
        assert not roundtrip(torch.zeros(3, 200), bits, rotated).any()


@WIDTHS
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_a_group_that_is_not_finite_comes_back_not_finite_and_alone(bits, value):
    x = torch.randn(3, 4 * GROUP)
    x[1, GROUP + 5] = value
    out = roundtrip(x, bits)
    assert not out[1, GROUP + 5].isfinite()
    out[1, GROUP : 2 * GROUP] = x[1, GROUP : 2 * GROUP] = 0
    assert out.isfinite().all()
    assert (out - x).abs().max() <= (x.amax() - x.amin()) / (2**bits - 1)


@ROTATED
@WIDTHS
def test_huge_and_tiny_ranges_stay_finite(bits, rotated):
    sign = torch.randint(0, 2, (2, 200)) * 2.0 - 1
    for size in (3e37, 1e-30, 1e-42):
        found = roundtrip(sign * size, bits, rotated, scale=0.5)
        assert (
            found - sign * size
        ).abs().max() <= 4 * size + 2e-39  # such numbers have few digits, and bf16's least is 9e-41


@WIDTHS
def test_no_value_leaves_its_range(bits):
    """Ranges in half precision are rounded outward: the code of the largest value is never one too high."""
    x = torch.randn(512, 256) * torch.logspace(-20, 20, 512).unsqueeze(1) + torch.linspace(-9, 9, 256)
    grid = Grid.of(x.view(512, 2, 128), bits, may_keep_zeros=True)
    assert (grid.least.squeeze(2) <= x.view(512, 2, 128).amin(2)).all()
    top = grid.least.double() + grid.step.double() * (2**bits - 1)
    assert (top.squeeze(2) >= x.view(512, 2, 128).amax(2)).all()
    assert torch.equal(grid.least, grid.least.bfloat16().float())
    assert torch.equal(grid.step, grid.step.bfloat16().float())
    for seed in range(20):
        assert ((roundtrip(x, bits, seed=seed) - x).abs() <= 0.5001 * steps_of(x, bits, False) + 1e-5 * x.abs()).all()


@ROTATED
@WIDTHS
def test_chosen_rows_and_columns_are_stored_as_if_they_were_all(bits, rotated, monkeypatch):
    monkeypatch.setattr("backsketch.numerics.CHUNK_ELEMENTS", 900)  # several slabs
    x, chosen = torch.randn(9, 300), torch.tensor([7, 0, 3, 8, 1])
    whole = stored(x[chosen], bits, rotated)
    found = [stored(x, bits, rotated, chosen=chosen), StoredRows.empty(x, 5, 300, bits, rotated, 0)]
    for columns in (slice(0, 256), slice(256, 300)):
        write(found[1], x[chosen][:, columns], first_column=columns.start)
    found.append(stored(x[chosen].t().contiguous().t(), bits, rotated))  # columns are contiguous, not rows
    for one in found:  # but for the last bit of rotated values, which depends on how many are rotated at once
        assert (one.codes != whole.codes).sum() <= 2 * rotated
        assert (one.ranges != whole.ranges).sum() <= 2 * rotated
    torch.testing.assert_close(read(whole, slice(2, 4), x.dtype), read(whole, slice(None), x.dtype)[2:4])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [None, 8, 4, 3, 2])
def test_bytes(bits, dtype):
    for features in (1, 3, 128, 200, 300, 768):
        x = torch.randn(9, features, dtype=dtype)
        parts = (x,) if bits is None else (stored(x, bits).codes, stored(x, bits).ranges)
        assert sum(part.nbytes for part in parts) == stored_bytes(9, features, bits, dtype.itemsize)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.258), (4, 0.133), (3, 0.1016), (2, 0.0704)])
def test_a_row_of_768_takes_no_more_than_its_codes_and_four_bytes_a_group(bits, share):
    assert stored_bytes(1, 768, bits, 4) == 768 * bits // 8 + 6 * 4
    assert stored_bytes(1, 768, bits, 4) <= share * 768 * 4


@WIDTHS
def test_codes_are_laid_out_as_docs_storage_says(bits):
    for count in (*range(1, 20), 100, 127, 128):
        codes = torch.randint(0, 2**bits, (3, 2, count), dtype=torch.uint8)
        joined = torch.empty(3, 2, group_bytes(count, bits), dtype=torch.uint8)
        join(codes, bits, out=joined)
        assert torch.equal(split(joined, bits, count), codes)
    codes = torch.arange(128).remainder(2**bits).to(torch.uint8)
    joined = torch.empty(group_bytes(128, bits), dtype=torch.uint8)
    join(codes, bits, out=joined)
    one = codes.tolist()
    for place in range(16):
        eight = [one[place + 16 * part] for part in (0, 4, 2, 6, 1, 5, 3, 7)]
        if bits == 4:
            assert joined[place] == one[place] + 16 * one[place + 64]
        if bits in (2, 3):
            low = [one[place + 32 * part] % 4 for part in (0, 2, 1, 3)]
            assert joined[place] == sum(code << 2 * at for at, code in enumerate(low))
        if bits == 3:
            assert joined[32 + place] == sum((code >> 2) << at for at, code in enumerate(eight))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 44, 64, 96, 127, 128])
def test_a_rotation_is_orthonormal_and_undone(size):
    x = torch.randn(5, 3, size, dtype=torch.float64)
    turned = rotate(x)
    torch.testing.assert_close(rotate_back(turned), x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    full = (
        torch.eye(size, dtype=torch.float64)
        * _signs(size, x.device, x.dtype)
        @ transform_matrix(size, x.device, x.dtype).t()
    )
    torch.testing.assert_close(turned, x @ full)
    torch.testing.assert_close(full @ full.t(), torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [44, 64, 96, 128])
def test_outliers_and_constants_spread_over_their_group(size):
    for value in (torch.ones(1, size), torch.eye(size)):
        assert rotate(value).abs().max() <= 3 * value.norm(dim=-1).max() / math.sqrt(size)


@WIDTHS
def test_nothing_to_store(bits):
    assert roundtrip(torch.empty(0, 5), bits).shape == (0, 5)
    assert roundtrip(torch.empty(3, 0), bits).shape == (3, 0)
    assert roundtrip(torch.empty(0, 300), bits, rotated=True).shape == (0, 300)


def test_autocast_does_not_change_what_is_stored():
    x = torch.randn(20, 300)
    plain = stored(x, 3, rotated=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = stored(x, 3, rotated=True)
        assert torch.equal(read(found, slice(None), x.dtype), read(plain, slice(None), x.dtype))
    assert torch.equal(found.codes, plain.codes)


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
        rows = stored(torch.empty(4, 300, device=meta), 3, rotated=True)
        assert read(rows, slice(None), torch.float32).device == meta
        for kind in (Cosine, Fourier, Hadamard):
            assert kind.matrix(8, meta).device == meta
    assert not wide

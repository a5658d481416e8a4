"""Stored slopes: unbiased, of a known variance, in so many bytes, whatever the function, the layout and the type."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from backsketch import cpu_library
from backsketch.random_words import Seed
from backsketch.storage import accelerator_kernel, cpu_kernel, cpu_slopes, slope_functions, slope_reference
from backsketch.storage.codes import group_bytes, split
from backsketch.storage.dither import column_dither, dither, row_dither
from backsketch.storage.groups import GROUP
from backsketch.storage.packing import without_fused_kernels
from backsketch.storage.sizes import packed_bytes
from backsketch.storage.slope_functions import GELU, SILU, Slope, celu, elu, softplus
from backsketch.storage.slopes import times_slopes, write_slopes
from cases import within_five_standard_errors

SEED = 0x123456789ABCDEF
WIDTHS = pytest.mark.parametrize("bits", [8, 4, 3, 2])
FLOATS = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])

# Each slope, and the function whose derivative it is.
FUNCTIONS = {
    slope_functions.GELU: F.gelu,
    slope_functions.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    slope_functions.SILU: F.silu,
    slope_functions.MISH: F.mish,
    slope_functions.HARDSWISH: F.hardswish,
    slope_functions.TANH: torch.tanh,
    slope_functions.TANHSHRINK: F.tanhshrink,
    slope_functions.SIGMOID: torch.sigmoid,
    slope_functions.LOG_SIGMOID: F.logsigmoid,
    slope_functions.SOFTSIGN: F.softsign,
    slope_functions.ERF: torch.erf,
    slope_functions.ATAN: torch.atan,
    slope_functions.ASINH: torch.asinh,
    slope_functions.SIN: torch.sin,
    slope_functions.COS: torch.cos,
    slope_functions.SELU: F.selu,
    softplus(): F.softplus,
    softplus(2.0, 3.0): lambda x: F.softplus(x, 2.0, 3.0),
    elu(): F.elu,
    elu(2.5): lambda x: F.elu(x, 2.5),
    elu(-0.3): lambda x: F.elu(x, -0.3),
    celu(0.4): lambda x: F.celu(x, 0.4),
}
ALL = pytest.mark.parametrize("slope", FUNCTIONS, ids=[f"{slope.name} {slope.high:.2f}" for slope in FUNCTIONS])


FUSED = [slope_functions.GELU, slope_functions.GELU_TANH, SILU, slope_functions.SIGMOID, slope_functions.TANH]


@pytest.fixture(params=["reference", "fused"])
def kernels(request, monkeypatch):
    """A law that asks for this holds for the reference, and for the kernel of this CPU."""
    if request.param == "reference":
        with without_fused_kernels():
            yield slope_reference
        return
    needs_a_kernel()
    monkeypatch.setattr(cpu_kernel, "_LEAST_VALUES", 0)
    yield cpu_slopes


def needs_a_kernel():
    if cpu_library.why_not() is not None:
        pytest.skip("no C++ compiler, or kernels are switched off")


def stored(slope, x, bits, seed=SEED, dtype=None):
    """Return the slopes that come back: those that multiply a gradient of ones."""
    ones = torch.ones(x.shape, dtype=dtype or x.dtype)
    return times_slopes(slope, ones, write_slopes(slope, x, bits, seed), bits, seed)


def step_of(slope, bits):
    return (slope.high - slope.low) / (2**bits - 1)


def codes_of(codes, count, bits):
    """Return the codes themselves: (count,)."""
    full = count // GROUP * group_bytes(GROUP, bits)
    parts = [split(codes[:full].view(-1, group_bytes(GROUP, bits)), bits, GROUP).flatten()]
    if count % GROUP:
        parts.append(split(codes[full:], bits, count % GROUP))
    return torch.cat(parts).int()


def test_every_slope_is_tested():
    named = {value for value in vars(slope_functions).values() if isinstance(value, Slope)}
    assert named <= set(FUNCTIONS)


@ALL
def test_a_slope_is_the_derivative_of_its_function(slope):
    x = torch.linspace(-12, 12, 24_001, dtype=torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(FUNCTIONS[slope](x).sum(), x)
    corner = (x.abs() < 1e-9) | ((x.abs() - 3).abs() < 1e-9)  # where a one-sided derivative is as good as the other
    x = x.detach()
    assert ((slope.at(x) - expected).abs()[~corner] < 1e-7).all()  # torch rounds CELU’s parameter to fp32
    assert ((slope.at(x.float()).double() - slope.at(x.float().double())).abs() < 2e-6).all()
    assert slope.at(x.float()).dtype == torch.float32


@ALL
def test_the_range_bounds_the_slope_and_is_tight(slope):
    every_bf16 = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    every_bf16 = every_bf16[every_bf16.isfinite()]
    dense = torch.cat((torch.linspace(-20, 20, 400_001), torch.logspace(-40, 38, 5000), -torch.logspace(-40, 38, 5000)))
    found = slope.at(torch.cat((dense, every_bf16.float())))
    assert slope.low <= found.min()
    assert found.max() <= slope.high
    assert found.min() - slope.low < 2e-3 * (slope.high - slope.low)
    assert slope.high - found.max() < 2e-3 * (slope.high - slope.low)
    assert slope.low <= slope.at(dense.double()).min()
    assert slope.at(dense.double()).max() <= slope.high


def test_equal_parameters_give_equal_slopes():
    assert elu(0.5) == elu(0.5) == elu(alpha=0.5)
    assert elu(1) == elu(1.0)
    assert hash(celu(0.5)) == hash(elu(0.5, 1.0, 2.0))
    assert softplus(2.0) != softplus(3.0)
    for make in (lambda: celu(-1.0), lambda: elu(input_scale=-2.0)):
        with pytest.raises(ValueError, match="must be above 0, or the derivative has no bound, got -"):
            make()


@pytest.mark.usefixtures("kernels")
@WIDTHS
def test_slopes_come_back_unbiased_with_the_variance_of_uniform_errors(bits):
    x = torch.cat((torch.randn(300) * 2, torch.tensor([-0.7518, 0.7518, 1.4142, -1.4142, 0.0, 50.0, -50.0])))
    for slope in (GELU, SILU):
        errors = torch.stack([stored(slope, x, bits, seed) for seed in range(400)]) - slope.at(x)
        scaled = errors / step_of(slope, bits)
        assert scaled.abs().max() <= 0.5001
        assert within_five_standard_errors(scaled, 0.0, rounding=1e-3)
        assert within_five_standard_errors(scaled.square(), 1 / 12, rounding=1e-3)
        assert within_five_standard_errors(scaled[:, :GROUP] * scaled[:, GROUP : 2 * GROUP], 0.0, rounding=1e-3)


@ALL
@pytest.mark.usefixtures("kernels")
@WIDTHS
def test_every_function_is_within_half_a_step(slope, bits):
    x = torch.linspace(-8, 8, 5000).view(50, 100)
    assert (stored(slope, x, bits) - slope.at(x)).abs().max() <= 0.5001 * step_of(slope, bits)


@pytest.mark.usefixtures("kernels")
@WIDTHS
def test_the_law_is_that_of_docs_storage(bits):
    x = torch.randn(3, 171)
    rows = -(-x.numel() // GROUP)
    u = dither(row_dither(SEED, rows, x.device), column_dither(0, GROUP, x.device, x.dtype)).flatten()[: x.numel()]
    step, exact = step_of(GELU, bits), GELU.at(x).flatten()
    expected = ((exact.double() - GELU.low) / step + u).floor().clamp(0, 2**bits - 1)
    codes = codes_of(write_slopes(GELU, x, bits, SEED), x.numel(), bits)
    assert (codes != expected).sum() <= 1
    torch.testing.assert_close(stored(GELU, x, bits).flatten(), (GELU.low + step * (codes - u + 0.5)).float())


@pytest.mark.usefixtures("kernels")
@WIDTHS
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (127,), (128,), (129,), (2, 3, 43), (5, 256)])
def test_shapes_and_bytes(bits, shape):
    x = torch.randn(shape)
    codes = write_slopes(GELU, x, bits, SEED)
    full, rest = divmod(x.numel(), GROUP)
    assert codes.shape == (packed_bytes(x.numel(), bits),)
    assert codes.dtype == torch.uint8
    planes = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}[bits]
    assert codes.numel() == full * 16 * bits + sum(math.ceil(rest * width / 8) for width in planes)
    out = stored(GELU, x, bits)
    assert out.shape == x.shape
    assert ((out - GELU.at(x)).abs() <= 0.5001 * step_of(GELU, bits)).all()


@FLOATS
@pytest.mark.usefixtures("kernels")
@WIDTHS
def test_types(bits, dtype):
    x = torch.randn(7, 150).to(dtype)
    grad = torch.randn(7, 150).to(dtype)
    codes = write_slopes(GELU, x, bits, SEED)
    out = times_slopes(GELU, grad, codes, bits, SEED)
    assert out.dtype == dtype
    exact = stored(GELU, x, bits, dtype=torch.float64)
    unit = torch.finfo(dtype).eps + 2.0**-22
    assert ((out.double() - grad.double() * exact).abs() <= unit * grad.double().abs()).all()
    assert (exact - GELU.at(x.double())).abs().max() <= 0.5001 * step_of(GELU, bits)


def layouts():
    """Yield tensors that are not contiguous, of every kind."""
    x = torch.randn(6, 5, 40, 7)
    yield x.permute(0, 2, 1, 3)
    yield x.to(memory_format=torch.channels_last)
    yield x[:, 1:4, ::3]
    yield x[0].t() if x[0].dim() == 2 else x[0].transpose(0, 2)
    yield torch.randn(1, 3000).t()
    yield torch.randn(2, 1).expand(2, 900)
    yield torch.randn(5).expand(300, 5)
    yield torch.randn(30, 1, 40).transpose(0, 2)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("slab", [GROUP, 300, 1 << 18])
def test_values_are_taken_in_row_major_order_whatever_their_layout(slab, monkeypatch):
    for x in layouts():
        whole = write_slopes(SILU, x.contiguous(), 4, SEED)
        expected = times_slopes(SILU, x.contiguous(), whole, 4, SEED)
        with monkeypatch.context() as small:
            small.setattr("backsketch.numerics.CHUNK_ELEMENTS", slab)
            assert torch.equal(write_slopes(SILU, x, 4, SEED), whole)
            found = times_slopes(SILU, x, whole, 4, SEED)
        assert torch.equal(found, expected)
        assert found.is_contiguous()


@pytest.mark.usefixtures("kernels")
@WIDTHS
def test_what_is_not_finite_leaves_its_neighbours_alone(bits):
    x = torch.randn(500)
    for slope in FUNCTIONS:
        odd = x.clone()
        odd[::7] = torch.tensor([math.nan, math.inf, -math.inf] * 24)
        found, expected = stored(slope, odd, bits), stored(slope, x, bits)
        kept = torch.arange(500) % 7 > 0
        assert torch.equal(found[kept], expected[kept])
        assert found.isfinite().all()


def test_no_helper_of_the_size_of_the_input_is_made():
    largest: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            largest.extend(part.untyped_storage().nbytes() for part in [out] if isinstance(part, torch.Tensor))
            return out

    for x in (torch.randn(1 << 21), torch.randn(512, 4096).t()):
        largest.clear()
        with Watch():
            write_slopes(GELU, x, 3, SEED)
        own = x.untyped_storage().nbytes()
        assert max(size for size in largest if size != own) <= own / 4


def test_meta_and_seeds_on_a_device():
    x = torch.empty(3, 5, 100, device="meta")
    on_device = torch.empty((), dtype=torch.int64, device="meta")
    cases: list[tuple[Slope, int, Seed]] = [(slope, 4, SEED) for slope in FUNCTIONS]
    cases += [(GELU, bits, on_device) for bits in (8, 3, 2)]
    for slope, bits, seed in cases:
        codes = write_slopes(slope, x, bits, seed)
        assert codes.shape == (packed_bytes(1500, bits),)
        assert codes.is_meta
        out = times_slopes(slope, x.bfloat16(), codes, bits, seed)
        assert (out.shape, out.dtype, out.is_meta) == (x.shape, torch.bfloat16, True)
    x = torch.randn(300)
    assert torch.equal(write_slopes(GELU, x, 3, torch.tensor(SEED)), write_slopes(GELU, x, 3, SEED))


@pytest.mark.skipif(not accelerator_kernel.triton_is_here(), reason="Triton is not installed")
def test_on_an_accelerator_there_is_one_launch_each_way():
    """For functions of the kernel; others take their own steps first."""
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.empty(3, 5, 100, device="meta")
    for slope in FUSED:
        seen.clear()
        with Watch():
            codes = write_slopes(slope, x, 3, SEED)
            times_slopes(slope, x, codes, 3, SEED)
        launches = [name for name in seen if not name.startswith(("aten.detach", "aten.view", "aten._unsafe_view"))]
        assert launches == ["backsketch.pack_slopes.default", "backsketch.times_slopes.default"]


def test_an_input_that_requires_gradients_and_autocast_change_nothing():
    x = torch.randn(300, requires_grad=True)
    plain = write_slopes(GELU, x.detach(), 3, SEED)
    codes = write_slopes(GELU, x, 3, SEED)
    assert not codes.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(write_slopes(GELU, x, 3, SEED), plain)
    assert torch.equal(codes, plain)


# The kernel of a CPU against the reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@WIDTHS
def test_the_kernel_is_the_reference_but_for_a_last_bit(bits, dtype):
    needs_a_kernel()
    x = torch.cat((torch.linspace(-12, 12, 60_000), torch.randn(60_000) * 1.5, torch.randn(77) * 1e30)).to(dtype)
    grad = torch.randn(x.shape).to(dtype)
    for slope in [*FUSED, slope_functions.MISH, elu(2.5)]:
        codes = cpu_slopes.write(slope, x, bits, SEED)
        law = slope_reference.write(slope, x, bits, SEED)
        assert codes.shape == law.shape
        apart = (codes_of(codes, len(x), bits) - codes_of(law, len(x), bits)).abs()
        assert apart.max() <= 1
        assert apart.float().mean() <= 1e-4
        found = [kernels.times(slope, grad, codes, bits, SEED) for kernels in (cpu_slopes, slope_reference)]
        assert torch.equal(*found)


def test_slopes_of_the_kernel_are_right_to_2e_6():
    """Codes that overflow their bits show the last ones: a step of 2⁻²¹, the code mod 256."""
    needs_a_kernel()
    x = torch.cat((torch.linspace(-12, 12, 20_000), torch.tensor([0.0, 1e-30, 1e30, -1e30, math.inf, -math.inf])))
    u = column_dither(0, GROUP, x.device, x.dtype).repeat(len(x))[: len(x)]
    for slope in FUSED:
        exact = slope.at(x.double().clamp(-500, 500))
        codes = torch.empty(len(x), dtype=torch.uint8)
        cpu_library.library().write_slopes(
            cpu_slopes._NUMBERS[slope], 0, x.data_ptr(), len(x), 0, 0, 0, -0.2, 2.0**21, 8, codes.data_ptr(), 1
        )
        errors = (codes - ((exact + 0.2) * 2**21 + u) + 128) % 256 - 128 + 0.5
        assert errors.abs().max() * 2.0**-21 < 2e-6, slope


def test_threads_change_nothing(monkeypatch):
    needs_a_kernel()
    monkeypatch.setattr(cpu_library, "_LEAST_FOR_THREADS", 0)
    x, found = torch.randn(70_001), []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        codes = cpu_slopes.write(GELU, x, 3, SEED)
        found.append((codes, cpu_slopes.times(GELU, x, codes, 3, SEED)))
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_who_serves():
    needs_a_kernel()
    many = torch.randn(1 << 15)
    assert cpu_slopes.serves(many, SEED)
    assert cpu_slopes.serves(many.bfloat16(), SEED)
    assert not cpu_slopes.serves(many[1:], SEED)
    assert not cpu_slopes.serves(many, torch.tensor(SEED))
    for other in (many.half(), many.double(), many.to("meta"), torch._efficientzerotensor(1 << 15)):
        assert not cpu_slopes.serves(other, SEED)

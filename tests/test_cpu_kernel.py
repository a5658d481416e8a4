"""The fused kernel of a CPU: the same random numbers as the reference, the same codes but for a last bit."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from backsketch import SketchConfig, cpu_library, sketch_
from backsketch.linear.keeping import keep
from backsketch.linear.weight_gradient import weight_gradient
from backsketch.storage import cpu_kernel, reference
from backsketch.storage.codes import split
from backsketch.storage.groups import group_sizes, parts_of
from backsketch.storage.packing import without_fused_kernels
from backsketch.storage.stored_rows import StoredRows
from cases import within_five_standard_errors

SEED = 0x123456789ABCDEF

COMPILER = shutil.which(os.environ.get("CXX", "g++")) is not None and not cpu_library.switched_off()
pytestmark = pytest.mark.skipif(not COMPILER, reason="no C++ compiler, or kernels are switched off")


def test_where_there_is_a_compiler_the_kernel_compiles():
    assert cpu_library.why_not() is None


def codes_of(stored):
    """Return the codes themselves: (rows, features)."""
    parts = []
    for columns, groups in parts_of(stored.features):
        size = group_sizes(groups, columns.stop - columns.start)[1]
        joined = reference._bytes_of(stored.codes, stored.bits, groups, size)
        parts.append(split(joined, stored.bits, size).flatten(1).int())
    return torch.cat(parts, 1)


def both(x, bits, rotated, chosen=None, mean=None):
    """Store rows by the kernel and by the reference."""
    found = []
    for kernels in (cpu_kernel, reference):
        rows = StoredRows.empty(x, len(x) if chosen is None else len(chosen), x.shape[1], bits, rotated, SEED)
        kernels.write(rows, x, chosen, mean, 0)
        found.append(rows)
    return found


def inputs(features, dtype):
    generator = torch.Generator().manual_seed(features)
    x = torch.randn(500, features, generator=generator) * torch.logspace(-4, 4, 500).unsqueeze(1)
    x[::7] = x[::7].relu()  # exact zeros
    x[1::7] = 3.7  # constant rows
    x[2::7, :: max(features // 3, 1)] *= 100  # outliers
    x[3] = 0
    return x.to(dtype)


@pytest.mark.parametrize("features", [1, 5, 100, 128, 300, 576, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_the_kernel_is_the_reference_but_for_a_last_bit(bits, rotated, dtype, features):
    x = inputs(features, dtype)
    mean, chosen = x.float().mean(0).to(dtype), torch.randperm(500)[:333]
    for options in ({}, {"chosen": chosen}, {"mean": mean}):
        ours, law = both(x, bits, rotated, **options)
        apart = (codes_of(ours) - codes_of(law)).abs()
        same_range = (ours.ranges == law.ranges).all(2)
        assert (~same_range).float().mean() <= 1e-3 * rotated
        in_groups = same_range.repeat_interleave(128, 1)[:, :features]
        assert (apart * in_groups).max() <= 1
        assert (apart * in_groups).float().mean() <= (1e-4 if apart.numel() > 1e4 else 1e-3)
        for turn in (True, False):
            back = [kernels.read(ours, slice(100, 300), dtype, 0.5, turn, None) for kernels in (cpu_kernel, reference)]
            largest = back[1].float().abs().amax(1, keepdim=True).clamp(min=1e-30)
            error = ((back[0].float() - back[1].float()) / largest).abs().max()
            assert error <= ((5e-6 if turn else 1e-6) if dtype == torch.float32 else 2**-7)


def test_zeros_and_what_is_not_finite_are_stored_as_by_the_reference():
    x = torch.randn(64, 600).relu()
    for place, value in enumerate([float("nan"), -float("nan"), float("inf"), -float("inf"), 3e38, 1e-42]):
        x[place, 130] = value
        x[place + 8, 599] = value
        x[place + 16] = value
    x[30, ::2] = -3e38
    for bits in (8, 4, 3, 2):
        for rotated in (False, True):
            ours, law = both(x, bits, rotated)
            one, other = ours.ranges.view(torch.int16), law.ranges.view(torch.int16)
            odd = (ours.ranges.isnan().any(2) & law.ranges.isnan().any(2)).unsqueeze(2)
            assert ((one == other) | odd).float().mean() > 0.995
            back = [kernels.read(ours, slice(0, 64), x.dtype, 0.5, True, None) for kernels in (cpu_kernel, reference)]
            assert torch.equal(*(part.isfinite() for part in back))
            assert rotated or not back[0][x == 0][back[1][x == 0] == 0].any()


def test_rows_are_spread_over_their_places():
    x = torch.randn(40, 200)
    rows = both(x, 3, True)[0]
    places = torch.tensor([3, -1, 0, 39, -1, -1, 7])
    expected = cpu_kernel.read(rows, slice(0, 40), x.dtype, 1.0, True, None)[places] * (places >= 0).unsqueeze(1)
    for kernels in (cpu_kernel, reference):
        torch.testing.assert_close(kernels.read(rows, slice(0, 7), x.dtype, 1.0, True, places), expected)
        torch.testing.assert_close(kernels.read(rows, slice(1, 5), x.dtype, 1.0, True, places), expected[1:5])


def test_columns_and_strides_of_rows_are_respected(monkeypatch):
    monkeypatch.setattr(cpu_kernel, "_LEAST_VALUES", 0)
    wide = torch.randn(50, 1000)
    x = wide[::2, 100:484]
    whole = both(x.contiguous(), 4, False)[1]
    assert torch.equal(both(x, 4, False)[0].codes, whole.codes)
    parts = StoredRows.empty(x, 25, 384, 4, False, SEED)
    for columns in (slice(0, 256), slice(256, 384)):
        cpu_kernel.write(parts, x[:, columns], None, None, columns.start)
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(parts.ranges, whole.ranges)


def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(cpu_library, "_LEAST_FOR_THREADS", 0)
    x, found = torch.randn(301, 576), []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        rows = both(x, 3, True)[0]
        found.append((rows.codes, cpu_kernel.read(rows, slice(0, 301), x.dtype, 1.0, True, None)))
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("ratio", [1.0, 0.95, 0.3])
def test_gradients_by_the_kernel_are_unbiased_and_those_of_the_reference(ratio):
    x, y = torch.randn(256, 200) + 0.3, torch.randn(256, 40)
    config = SketchConfig(ratio=ratio, bits=3, rotate=True, center=True)
    for valid in (None, torch.arange(256) % 3 > 0):
        masked = y if valid is None else y * valid.unsqueeze(1)
        exact, seed = masked.t() @ x, torch.tensor(SEED)
        ours = weight_gradient(keep(x, config, seed, valid), masked, config, 200, valid)
        with without_fused_kernels():
            law = weight_gradient(keep(x, config, seed, valid), masked, config, 200, valid)
        torch.testing.assert_close(ours, law, rtol=0, atol=2e-2 * float(exact.std()))
        draws = []
        for draw in range(300):
            kept = keep(x, config, torch.tensor(draw * 7919), valid)
            draws.append(weight_gradient(kept, masked, config, 200, valid))
        assert within_five_standard_errors(torch.stack(draws), exact)


@pytest.mark.parametrize("x", [torch.randn(300, 200).half(), torch.randn(300, 200).double(), torch.randn(200, 300).t()])
def test_the_reference_serves_what_the_kernel_does_not(x):
    rows = StoredRows.empty(x, 300, 200, 4, False, 1)
    assert not cpu_kernel.serves(rows, x, x.dtype)
    assert not cpu_kernel.serves(StoredRows.empty(x, 3, 200, 4, False, 1), torch.randn(3, 200), torch.float32)
    assert cpu_kernel.serves(rows, torch.randn(300, 200), torch.float32)


TRAINS = """
import torch, backsketch
from backsketch import cpu_library
layer = backsketch.sketch_(torch.nn.Linear(300, 20), backsketch.SketchConfig(bits=3, ratio=1.0, rotate=True))
layer(torch.ones(300, 300)).sum().backward()
assert (layer.weight.grad - 300).abs().max() < 30, layer.weight.grad
open(r"{path}", "w").write(str(cpu_library.why_not()))
"""


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({"CXX": "/nowhere/c++", "PATH": "/nowhere"}, "/nowhere/c++"), ({"TORCHDYNAMO_DISABLE": "1"}, "is set")],
)
def test_without_a_compiler_the_reference_serves_and_nothing_is_printed(environment, reason, tmp_path):
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", TRAINS.format(path=tmp_path / "why")],
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert reason in (tmp_path / "why").read_text()


DEFAULTS = """
import torch, backsketch
layer = backsketch.sketch_(torch.nn.Linear(576, 20), backsketch.SketchConfig(bits=8, ratio=1.0, rotate=True))
x, y = torch.randn(256, 576), torch.randn(256, 20)
exact = y.t() @ x
{setting}
layer(x).backward(y)
assert ((layer.weight.grad - exact).norm() / exact.norm()).item() < 0.02, layer.weight.grad
"""


@pytest.mark.parametrize(
    "setting",
    [
        "torch.set_default_dtype(torch.bfloat16)",
        "torch.set_default_dtype(torch.float64)",
        "torch.set_default_device('meta')",
    ],
)
def test_the_defaults_of_torch_do_not_reach_the_kernel(setting):
    """In a process of its own, since the matrix of a shorter last group is made once."""
    subprocess.run([sys.executable, "-c", DEFAULTS.format(setting=setting)], check=True)


def test_rows_that_hooks_bring_back_in_another_layout_are_read_rightly():
    x, y = torch.randn(256, 576), torch.randn(256, 20)
    layer = sketch_(torch.nn.Linear(576, 20), SketchConfig(bits=8, ratio=1.0))

    def turned(tensor):
        return tensor.transpose(0, 1).contiguous() if tensor.dim() > 1 else tensor

    def back(tensor):
        return tensor.transpose(0, 1) if tensor.dim() > 1 else tensor

    with torch.autograd.graph.saved_tensors_hooks(turned, back):
        out = layer(x)
    out.backward(y)
    exact = y.t() @ x
    gradient = layer.weight.grad
    assert gradient is not None
    assert (gradient - exact).norm() < 0.02 * exact.norm()


def test_the_reference_serves_zeros_without_memory():
    x = torch._efficientzerotensor((300, 200))
    assert not cpu_kernel.serves(StoredRows.empty(torch.randn(1), 300, 200, 4, False, 1), x, x.dtype)

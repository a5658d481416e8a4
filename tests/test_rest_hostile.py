"""Unusual calls of operations inside ``packing``: what backward then computes is what it computes without."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backsketch import RestConfig, saved_memory, sketch_, unsketch_
from backsketch.rest.packing_mode import packing
from backsketch.rest.saving import observe_saving
from backsketch.storage.packed_tensor import PackedMemory
from cases import within_five_standard_errors

ALL_8_BITS = RestConfig(pointwise=8, product=8, min_elements=1)


def gradients(function, inputs, config=None):
    own = [each.clone().requires_grad_() for each in inputs]
    if config is None:
        out = function(*own)
    else:
        with packing(config):
            out = function(*own)
    generator = torch.Generator().manual_seed(7)
    return torch.autograd.grad(out, own, torch.randn(out.shape, generator=generator).to(out.dtype))


def x_of(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "ends", [(0.0, math.inf), (-math.inf, 0.5), (-math.inf, math.inf), (-0.7, 0.703), (1.0, 1.003)]
)
def test_hardtanh_with_any_ends_is_exact(ends, dtype):
    inputs = [x_of(64, 64, dtype=dtype)]
    exact = gradients(lambda x: F.hardtanh(x, *ends), inputs)
    packed = gradients(lambda x: F.hardtanh(x, *ends), inputs, ALL_8_BITS)
    assert torch.equal(exact[0], packed[0])


@pytest.mark.parametrize(
    ("pool", "shape"),
    [(F.max_pool1d, (2, 40_000)), (F.max_pool2d, (2, 256, 256)), (F.max_pool3d, (1, 16, 64, 64))],
)
def test_max_pool_of_one_image_without_a_batch(pool, shape):
    inputs = [x_of(*shape)]
    exact = gradients(lambda x: pool(x, 2), inputs)
    packed = gradients(lambda x: pool(x, 2), inputs, ALL_8_BITS)
    assert torch.equal(exact[0], packed[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "target",
    [
        torch.full((64,), -100),
        torch.arange(64, dtype=torch.uint8),
        torch.arange(64).masked_fill(torch.arange(64) < 9, -100),
    ],
    ids=["all ignored", "bytes", "some ignored"],
)
def test_cross_entropy_with_any_targets(target, reduction):
    def loss(x):
        return F.cross_entropy(x, target, reduction=reduction)

    (exact,), (packed,) = gradients(loss, [x_of(64, 64)]), gradients(loss, [x_of(64, 64)], ALL_8_BITS)
    assert (exact - packed).square().sum() <= 1e-3 * exact.square().sum()


EDGES = torch.randint(0, 64, (2, 900), generator=torch.Generator().manual_seed(2))


def sparse(values):
    return torch.sparse_coo_tensor(EDGES, values, (64, 64)).coalesce()


def nested(function):
    def run(*parts):
        out = function(torch.nested.as_nested_tensor(list(parts)))
        return torch.cat([part.flatten() for part in out.unbind()])

    return run


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda v, x: sparse(v) @ x, [(900,), (64, 64)]),
        (lambda v, x: (sparse(v) * x).to_dense(), [(900,), (64, 64)]),
        (lambda v: torch.relu(sparse(v)).to_dense(), [(900,)]),
        (lambda v: (sparse(v) ** 2).to_dense(), [(900,)]),
        (lambda a, x: a.to_sparse_csr() @ x, [(64, 64), (64, 64)]),
        (nested(torch.relu), [(30, 64), (40, 64)]),
        (nested(F.gelu), [(30, 64), (40, 64)]),
        (nested(lambda x: x * x), [(30, 64), (40, 64)]),
        (nested(lambda x: torch.softmax(x, -1)), [(30, 64), (40, 64)]),
        (nested(lambda x: F.linear(x, torch.eye(64))), [(30, 64), (40, 64)]),
    ],
)
def test_sparse_and_nested_tensors_stay_as_they_are(function, shapes):
    inputs = [x_of(*shape) for shape in shapes]
    exact, packed = gradients(function, inputs), gradients(function, inputs, ALL_8_BITS)
    for one, other in zip(exact, packed, strict=True):
        assert (one - other).square().sum() <= 1e-3 * one.square().sum()


def test_windows_that_overlap_take_no_more_than_the_memory_they_are_of():
    weight = torch.randn(64, requires_grad=True)

    def kept(config):
        x = x_of(20_000).requires_grad_()
        with saved_memory() as saved, packing(config) if config else nullcontext():
            out = (x * 2.0).unfold(0, 64, 1) * weight
        del x
        assert out.shape == (19_937, 64)
        return saved.most_activations

    assert kept(RestConfig.of(2)) <= kept(None)


@pytest.mark.parametrize("function", [lambda x: x * x * x, lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True))])
def test_a_tensor_times_itself_is_kept_as_its_square_is(function):
    def shares(config):
        x = x_of(32, 64).requires_grad_()
        names = []
        with observe_saving(lambda family, tensor, kept: names.append(family)), packing(config):
            function(x)
        return names[0]

    assert shares(ALL_8_BITS) == "norm"
    config, x = RestConfig(product=4, min_elements=1), [x_of(32, 64)]
    (exact,) = gradients(lambda x: function(x).sum(), x)
    (packed,) = gradients(lambda x: function(x).sum(), x, config)
    assert (exact - packed).square().sum() <= 1e-2 * exact.square().sum()


# Memory, layouts and types that rounding must not misread


@pytest.mark.parametrize("keeps", ["retain_graph", "a graph that lives on"])
def test_memory_that_numpy_overwrites_has_no_stale_copy(keeps):
    buffer = np.random.default_rng(0).standard_normal((8, 3, 16, 16)).astype("f")
    x = torch.from_numpy(buffer)
    first = nn.Conv2d(3, 8, 3)
    model = sketch_(nn.Sequential(first, nn.ReLU(), nn.Conv2d(8, 8, 3)), rest=RestConfig(product=8, min_elements=64))
    watched = model(x).mean()
    if keeps == "retain_graph":
        watched.backward(retain_graph=True)
        model.zero_grad()
    buffer[:] = 3 * buffer[::-1] + 1
    model(x).square().mean().backward()
    found = first.weight.grad
    model.zero_grad()
    unsketch_(model)(x).square().mean().backward()
    assert found is not None
    assert first.weight.grad is not None
    assert (found - first.weight.grad).square().sum() < 1e-3 * found.square().sum()


@pytest.mark.parametrize("batch", [1, 2])
def test_channels_that_come_last_are_read_as_such(batch):
    """Batch norm takes the layout from all strides, also from those of dimensions of size 1."""
    x = torch.randn(batch, 8, 14, 14).to(memory_format=torch.channels_last).requires_grad_()
    model = nn.Sequential(nn.BatchNorm2d(8), nn.GELU())
    grad_out = torch.randn(batch, 8, 14, 14)
    (exact,) = torch.autograd.grad(model(x), x, grad_out)
    sketch_(model, rest=RestConfig(pointwise=8, min_elements=64))
    (found,) = torch.autograd.grad(model(x), x, grad_out)
    assert (found - exact).square().sum() < 1e-3 * exact.square().sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_without_eps_takes_that_of_torch(dtype):
    x = (torch.randn(32, 64) * 0.01).to(dtype).requires_grad_()
    model = nn.Sequential(nn.RMSNorm(64, elementwise_affine=False))
    grad_out = torch.randn(32, 64).to(dtype)
    (exact,) = torch.autograd.grad(model(x), x, grad_out)
    sketch_(model, rest=RestConfig(norm=4, min_elements=64))
    draws = [torch.autograd.grad(model(x), x, grad_out)[0].double() for _ in range(20)]
    error = torch.stack(draws).mean(0) - exact.double()
    assert error.square().sum() < 0.01 * exact.double().square().sum()


def test_the_largest_numbers_of_fp16_stay_finite():
    x = torch.full((4, 128), 65504.0, dtype=torch.float16)
    x[::2] *= -1
    x[:, ::3] = 65000.0
    packed = PackedMemory.of(x, 4, False, 7)
    assert packed.values().isfinite().all()
    assert PackedMemory.of(torch.full_like(x, torch.inf), 4, False, 7).values().isnan().all()


@pytest.mark.parametrize("huge", [1e4, 1e30])
@pytest.mark.parametrize("rows", [64, 512, 5000])
def test_a_few_rows_with_huge_values_cost_the_others_nothing(rows, huge):
    """First tokens of language models have such values; the mean of all rows must not follow them."""
    x = x_of(rows, 256)
    x[0, 7], x[1, 9], x[rows // 2, 7] = huge, -huge, huge
    others = [row for row in range(rows) if row not in (0, 1, rows // 2)]
    errors = [
        (PackedMemory.of(x, 8, False, 7, centred=centred).values().view_as(x) - x)[others].square().sum()
        for centred in (False, True)
    ]
    assert errors[1] < 1.2 * errors[0]


class Contracts(nn.Module):
    """Multiplies a product of its input and a weight by itself in one operation."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x):
        return self.function(x * self.weight)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.linear(x, x.T @ x / 16),
        lambda x: torch.einsum("bi,bi,bi->b", x, x, x),
        lambda x: torch.einsum("bi,bi,bi->b", [x, x, x]),
        lambda x: torch.mul(input=x * x, other=x),
        lambda x: F.bilinear(x, x, torch.ones(2, 16, 16) / 16),
    ],
    ids=["a weight made of the input", "einsum", "einsum of a list", "by name", "bilinear"],
)
def test_one_tensor_multiplied_twice_by_one_operation_is_unbiased(function):
    torch.manual_seed(0)
    model, x = Contracts(function), torch.rand(32, 16) + 0.2
    out = model(x)
    (exact,) = torch.autograd.grad(out.sum(), model.weight)
    sketch_(model, rest=RestConfig(product=2, norm=None, min_elements=64))
    draws = torch.stack([torch.autograd.grad(model(x).sum(), model.weight)[0] for _ in range(300)]).double()
    assert within_five_standard_errors(draws @ exact.double() / exact.double().square().sum(), 1)


def test_parts_of_a_parameter_stay_as_they_are():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.stacked, self.joined = nn.Parameter(torch.randn(2, 32, 32)), nn.Parameter(torch.randn(32, 96))

        def forward(self, x):
            for weight in (*self.stacked.unbind(0), *self.joined.chunk(3, 1), *self.joined.split([32, 64], 1)[:1]):
                x = x @ weight
            return x

    seen = []
    model = sketch_(Parts(), rest=RestConfig(min_elements=64))
    with observe_saving(lambda family, tensor, kept: seen.append((tensor.shape, kept))):
        model(torch.randn(100, 32, requires_grad=True))
    assert all(kept is None for shape, kept in seen if tuple(shape) == (32, 32))
    assert any(kept is not None for _, kept in seen)


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(2, 64, 128), (16, 64), (2, 64, 2, 64)])
def test_rows_of_zeros_are_normed_as_such(norm, bits, shape):
    """A token that begins as zeros, as in BEiT, is divided by the root of eps: no rounding error there is small."""
    generator = torch.Generator().manual_seed(0)
    x, grad_out = torch.randn(shape, generator=generator) + 3, torch.randn(shape, generator=generator)
    x[:, 1] = 0
    own, weight = shape[2:] if len(shape) == 4 else shape[-1:], torch.ones(shape[-1])

    def step(config):
        leaf, scale = x.clone().requires_grad_(), weight.expand(own).clone().requires_grad_()
        with nullcontext() if config is None else packing(config):
            out = norm(leaf * 1.0, own, scale, eps=1e-12)
        return torch.autograd.grad(out, (leaf, scale), grad_out)

    for packed, exact in zip(step(RestConfig(norm=bits, min_elements=64)), step(None), strict=True):
        assert (packed - exact).norm() < (0.02 if bits == 8 else 0.3) * exact.norm()


def test_the_input_of_a_norm_may_be_expanded():
    token, weight = torch.randn(1, 128, requires_grad=True), torch.ones(128, requires_grad=True)

    def step(config):
        with nullcontext() if config is None else packing(config):
            out = F.layer_norm((token * 1.0).expand(64, -1), (128,), weight)
        return torch.autograd.grad(out, (token, weight), x_of(64, 128))

    for packed, exact in zip(step(RestConfig(min_elements=64)), step(None), strict=True):
        assert (packed - exact).norm() < 0.02 * exact.norm()


def test_the_root_mean_squares_of_a_norm_stay_as_they_are():
    """In few bits that of a huge token would get the rounding of the others, and they that of a token of zeros."""
    x, grad_out = x_of(4096, 128), x_of(4096, 128).flip(0)
    x[5] *= 1e3
    x[300] = 0

    def step(config):
        leaf = x.clone().requires_grad_()
        with nullcontext() if config is None else packing(config):
            out = F.rms_norm(leaf * 1.0, (128,), eps=1e-6)
        return torch.autograd.grad(out, leaf, grad_out)[0]

    exact = step(None)
    assert ((step(RestConfig()) - exact).norm(dim=1) < 0.03 * exact.norm(dim=1)).all()

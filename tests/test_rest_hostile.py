"""Unusual calls of operations inside ``packing``: what backward then computes is what it computes without."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from backsketch import RestConfig, saved_memory
from backsketch.rest.packing_mode import packing
from backsketch.rest.saving import observe_saving

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

"""What operations keep inside ``packing``: the same outputs, fewer bytes, and the gradient that its family promises."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backsketch import RestConfig, saved_memory
from backsketch.rest.norms import ZeroRows
from backsketch.rest.operations import OPERATIONS, register_operation
from backsketch.rest.packing_mode import packing, packing_apart
from backsketch.rest.rules import FewBits
from backsketch.rest.saving import observe_saving
from backsketch.seeds import draw_seed
from backsketch.storage.packed_tensor import PackedTensor

B, H, L, D = 4, 2, 64, 32
ROWS, FEATURES = 64, 192  # 12,288 values


def x_of(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape or (ROWS, FEATURES), generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def run(function, inputs, config=None, seed=0):
    """Return the output, the gradients of the inputs for a fixed random gradient of it, and the bytes kept."""
    torch.manual_seed(seed)
    own = leaves(*inputs)
    made = [each * 1.0 for each in own]  # activations, not leaves that the caller holds
    with saved_memory() as saved:
        if config is None:
            draw_seed()  # as packing does, so that dropout gets the same random numbers
            out = function(*made)
        else:
            with packing(config):
                out = function(*made)
        del made
    torch.manual_seed(7)
    grads = torch.autograd.grad(out, own, torch.randn_like(out))
    return out.detach(), grads, saved.most_activations


QKV = [x_of(B, H, L, D, seed=seed) for seed in (1, 2, 3)]
WEIGHT = nn.Parameter(x_of(FEATURES, FEATURES, seed=5) / 14)
HEADS = nn.MultiheadAttention(D, 2, dropout=0.1)

EXACT = {
    "relu": (F.relu, [x_of()]),
    "relu in place": (lambda x: F.relu(x, inplace=True), [x_of()]),
    "relu6": (lambda x: F.relu6(4 * x), [x_of()]),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), [x_of()]),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 1.5), [x_of()]),
    "hardsigmoid": (lambda x: F.hardsigmoid(3 * x), [x_of()]),
    "clamp": (lambda x: x.clamp(-0.5, 1.5), [x_of()]),
    "clamp, one end": (lambda x: x.clamp(min=0.25), [x_of()]),
    "masked_fill": (lambda x: x.masked_fill(x > 1, 0.0), [x_of()]),
    "where": (lambda x: torch.where(x > 0, x, 2 * x), [x_of()]),
    "dropout": (lambda x: F.dropout(x, 0.3), [x_of()]),
    "nn.Dropout": (nn.Dropout(0.1), [x_of()]),
}
UNBIASED = {
    "gelu": (F.gelu, [x_of()]),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), [x_of()]),
    "silu": (F.silu, [x_of()]),
    "tanh": (torch.tanh, [x_of()]),
    "sigmoid": (lambda x: x.sigmoid(), [x_of()]),
    "softplus": (lambda x: F.softplus(x, beta=2.0), [x_of()]),
    "elu": (nn.ELU(0.7), [x_of()]),
    "mish": (F.mish, [x_of()]),
    "hardswish": (F.hardswish, [x_of()]),
    "a * b": (lambda a, b: a * b, [x_of(), x_of(seed=2)]),
    "swiglu": (lambda a, b: F.silu(a) * b, [x_of(), x_of(seed=2)]),
    "matmul": (lambda a, b: a @ b.t(), [x_of(), x_of(seed=2)]),
    "bmm of transposed": (lambda a, b: torch.matmul(a, b.transpose(-1, -2)), QKV[:2]),
    "einsum": (lambda a, b: torch.einsum("bhld,bhmd->bhlm", a, b), QKV[:2]),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [x_of()]),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(ROWS) % 7), [x_of()]),
    "square": (torch.square, [x_of()]),
    "exp": (torch.exp, [x_of() / 2]),
}
PRECISE = {
    "softmax": (lambda x: x.softmax(-1), [2 * x_of()]),
    "layer_norm": (lambda x: F.layer_norm(x, (FEATURES,)), [x_of()]),
    "rms_norm": (lambda x: F.rms_norm(x, (FEATURES,)), [x_of()]),
    "group_norm": (lambda x: F.group_norm(x.view(4, 8, -1), 4), [x_of()]),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [x_of()]),
    "rms_norm, written out": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), [x_of()]),
    "attention": (F.scaled_dot_product_attention, QKV),
    "causal attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), QKV),
    "attention with dropout": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.2), QKV),
    "multi-head": (
        lambda x: HEADS(x, x, x, need_weights=False)[0],
        [x_of(L, 8, D, seed=4)],
    ),
    "glu": (F.glu, [x_of()]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [x_of(8, 4, 64, 48)]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x.view(4, 4, 32, 24), 2), [x_of()]),
}
ALL = EXACT | UNBIASED | PRECISE
EIGHT = RestConfig.of(8)


@pytest.mark.parametrize("name", ALL)
def test_outputs_are_the_same_bit_for_bit_and_fewer_bytes_are_kept(name):
    function, inputs = ALL[name]
    exact, _, before = run(function, inputs)
    out, _, after = run(function, inputs, RestConfig())
    assert torch.equal(out, exact)
    assert after < 0.45 * before


@pytest.mark.parametrize("name", EXACT)
def test_masks_and_comparisons_are_exact_in_one_bit(name):
    function, inputs = EXACT[name]
    _, exact, before = run(function, inputs)
    _, grads, after = run(function, inputs, RestConfig())
    assert all(torch.equal(grad, other) for grad, other in zip(grads, exact, strict=True))
    values = inputs[0].numel()
    assert after == values // 8, (before, after)


@pytest.mark.parametrize("name", UNBIASED)
def test_the_gradient_is_exactly_unbiased(name):
    function, inputs = UNBIASED[name]
    _, exact, _ = run(function, inputs)
    draws = 60
    config = RestConfig(pointwise=2, product=2, norm=2, other=2)
    found = [run(function, inputs, config, seed)[1] for seed in range(draws)]
    for place, grad in enumerate(exact):
        drawn = torch.stack([each[place] for each in found]).double()
        error = (drawn - grad).flatten(1)
        assert error.abs().max() > 0  # it is an estimate
        # Along the gradient, and along a fixed random direction.
        for direction in (grad, x_of(*grad.shape, seed=9)):
            along = error @ direction.flatten().double()
            assert along.mean().abs() < 5 * along.std() / draws**0.5
        scaled = error.mean(0) / error.std(0).clamp(min=1e-12) * draws**0.5
        assert 0.5 < scaled.square().mean() < 2  # no value has a bias of its own


@pytest.mark.parametrize("name", ALL)
def test_eight_bits_are_precise(name):
    function, inputs = ALL[name]
    _, exact, _ = run(function, inputs)
    _, grads, _ = run(function, inputs, EIGHT)
    for grad, other in zip(grads, exact, strict=True):
        assert (grad - other).square().sum() <= 1e-3 * other.square().sum()


@pytest.mark.parametrize("centers", [True, False])
def test_the_bias_of_a_norm_below_eight_bits_is_subtracted(centers):
    weight = x_of(FEATURES, seed=8)

    def function(x):
        return F.layer_norm(x, (FEATURES,), weight) if centers else F.rms_norm(x, (FEATURES,), weight)

    x = x_of() + 0.5
    _, (exact,), _ = run(function, [x])
    draws = 300
    for bits in (2, 4):
        found = [run(function, [x], RestConfig(norm=bits), seed)[1][0] for seed in range(draws)]
        error = (torch.stack(found).double() - exact).flatten(1)
        along = error @ exact.flatten().double()
        assert along.mean().abs() < 5 * along.std() / draws**0.5


def test_a_written_out_norm_below_eight_bits_is_unbiased():
    function, inputs = PRECISE["rms_norm, written out"]
    _, (exact,), _ = run(function, inputs)
    draws = 300
    found = [run(function, inputs, RestConfig(norm=2, product=2), seed)[1][0] for seed in range(draws)]
    along = (torch.stack(found).double() - exact).flatten(1) @ exact.flatten().double()
    assert along.mean().abs() < 5 * along.std() / draws**0.5


def test_bytes_are_those_of_the_written_format():
    values = ROWS * FEATURES
    packed = {bits: values * bits // 8 + values // 128 * 4 for bits in (8, 4, 3, 2)}
    for bits in (8, 4, 3, 2):
        assert run(lambda a, b: a * b, UNBIASED["a * b"][1], RestConfig(product=bits))[2] == 2 * packed[bits]
        assert run(F.gelu, [x_of()], RestConfig(pointwise=bits))[2] == values * bits // 8
    centred = values + ROWS * 2 * 4 + FEATURES * 2  # two groups a row, and the mean of the rows
    zeros = ROWS  # which rows are zero throughout
    assert run(lambda x: F.layer_norm(x, (FEATURES,)), [x_of()], RestConfig())[2] == centred + zeros + 2 * ROWS * 4


def test_one_copy_serves_all_operations_that_save_a_tensor():
    values = ROWS * FEATURES
    norm = PRECISE["rms_norm, written out"]
    assert run(*norm, RestConfig())[2] <= values + ROWS * 2 * 4 + FEATURES * 2 + 3 * ROWS * 4

    def attention(q, k, v):
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return F.linear(out.transpose(1, 2).reshape(B, L, H * D), WEIGHT[: H * D, : H * D])

    own = B * H * L * D
    four, eight = own // 2 + own // 128 * 4, own + own // 128 * 4
    inputs = [x_of(B, L, H, D, seed=seed) for seed in (1, 2, 3)]
    assert run(attention, inputs, RestConfig())[2] == 2 * eight + 2 * four + B * H * L * 4 + WEIGHT.nbytes


def heads_of(q, k, v):
    """Return attention of four heads, whose tensors lie token by token in memory, as projections make them."""
    q, k, v = (each.view(B, L, 4, D).transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 30), (torch.float64, 30), (torch.float16, 2)])
@pytest.mark.parametrize("name", ["attention", "layer_norm", "rms_norm, written out"])
def test_a_vector_that_all_tokens_share_costs_no_precision(name, dtype, size):
    """Their mean is kept apart, so the bits need not span it."""
    function: Any = heads_of if name == "attention" else PRECISE[name][0]
    count = 3 if name == "attention" else 1
    features = 4 * D if name == "attention" else FEATURES
    shared = size * x_of(features, seed=9)
    errors = []
    for vector in (0 * shared, shared):
        seen: list[Any] = []
        inputs = [(x_of(B, L, features, seed=seed) + vector).to(dtype).requires_grad_() for seed in range(count)]
        torch.manual_seed(0)
        note = partial(_note, seen)
        with observe_saving(note), packing(RestConfig()):
            out = function(*(x * 1.0 for x in inputs))
        packed = [(tensor, kept) for tensor, kept in seen if isinstance(kept, (PackedTensor, ZeroRows))]
        errors.append(torch.stack([(kept.unpack() - tensor).double().norm() for tensor, kept in packed]))
        del out
    assert (errors[0] > 0).all()
    assert (errors[1] < 4 * errors[0]).all()  # large q and k choose one key, so the output varies more, as v does


def _note(seen, family, tensor, kept):
    seen.append((tensor.detach(), kept))


def written_out(x, weight, dtype=None):
    """Return the norm as models write it, whose result is cast where they run in half precision."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (normed if dtype is None else normed.to(dtype))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_written_out_norm_multiplies_by_its_weight_is_made_again_from_its_input(dtype):
    """It takes no bytes of its own, and the weight's gradient is as precise as the copy of the input."""
    weight = nn.Parameter(x_of(FEATURES, seed=8).to(dtype or torch.float32))

    def step(config, outer=None):
        own = x_of().requires_grad_()
        torch.manual_seed(0)
        with outer or nullcontext(), saved_memory() as saved, nullcontext() if config is None else packing(config):
            out = written_out(own * 1.0, weight, dtype)
        grads = torch.autograd.grad(out.float(), (weight, own), x_of(seed=3))
        return grads[0].double(), grads[1], saved.most_activations

    exact, *_ = step(None)
    found, own, bytes_kept = step(RestConfig())
    assert 0 < (found - exact).square().sum() < 1e-4 * exact.square().sum()
    assert bytes_kept <= ROWS * FEATURES + ROWS * 2 * 4 + FEATURES * 2 + 2 * ROWS * 4 + weight.nbytes
    again, own_again, _ = step(RestConfig(), torch.autograd.graph.save_on_cpu())
    assert torch.equal(found, again)
    assert torch.equal(own, own_again)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_was_cast_to_and_fro_is_made_again_with_its_casts(narrow):
    """Values on the coarse grid of the narrow type come back on it."""
    weight = nn.Parameter(x_of(FEATURES, seed=8))
    saved = []

    def keeps(_family, tensor, kept):
        if tensor.shape == (ROWS, FEATURES):
            saved.append((tensor.detach(), kept))

    with packing(RestConfig()), observe_saving(keeps):
        x = x_of().requires_grad_() * 1.0
        normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(narrow).float()
        (weight * normed).sum()
    tensor, kept = saved[-1]
    assert torch.equal(tensor, normed)
    again = kept.unpack()
    assert torch.equal(again.to(narrow).float(), again)
    assert (again - tensor).square().sum() < 1e-2 * tensor.square().sum()


def test_a_cast_to_another_device_is_not_made_again_here():
    weight, other = nn.Parameter(torch.empty(FEATURES, device="meta", dtype=torch.bfloat16)), torch.device("meta")
    kept_of = []
    with packing(RestConfig()), observe_saving(lambda family, tensor, kept: kept_of.append((tensor, kept))):
        x = x_of().requires_grad_() * 1.0
        normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(other, torch.bfloat16)
        (weight * normed).sum()
    assert all(kept is None or kept.unpack().device == tensor.device for tensor, kept in kept_of)
    assert any(kept is not None and tensor.is_meta for tensor, kept in kept_of)


def test_a_product_is_made_again_neither_after_a_change_nor_from_a_changed_factor():
    weight = nn.Parameter(x_of(FEATURES, seed=8))

    def step(change, config):
        weight.grad = None
        x = x_of().requires_grad_()
        with nullcontext() if config is None else packing(config):
            y = x * 1.0
            factor = torch.rsqrt(y.pow(2).mean(-1, keepdim=True))
            normed = y * factor
            if change == "product":
                normed.detach().add_(3)
            out = weight * normed
            if change == "factor":
                factor.detach().add_(3)
        out.backward(x_of(seed=3))
        return weight.grad

    exact = step("product", None)
    assert (step("product", RestConfig()) - exact).square().sum() < 1e-2 * exact.square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step("factor", RestConfig())


def test_a_copy_is_not_shared_after_a_change_in_place():
    def function(x):
        y = x * 1.0
        z = y * y
        y.add_(3)
        return z + y * x_of(seed=3) * y

    _, (exact,), _ = run(lambda x: (x * x) + (x + 3) * x_of(seed=3) * (x + 3), [x_of()])
    _, (grad,), _ = run(function, [x_of()], EIGHT)
    assert (grad - exact).square().sum() < 1e-3 * exact.square().sum()


def test_a_tensor_that_stays_as_it_is_may_not_change_in_place():
    x = x_of().requires_grad_()
    with packing(RestConfig(product=None)):
        y = x * 1.0
        out = y * y
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_weights_constants_and_small_tensors_stay_as_they_are():
    layer = nn.Linear(FEATURES, FEATURES)
    x = x_of().requires_grad_()
    with saved_memory(layer) as saved, packing(RestConfig()):
        out = layer(x * 1.0)
    assert saved.parameters == layer.weight.nbytes
    values = ROWS * FEATURES
    assert saved.activations == values // 2 + values // 128 * 4
    del out
    table = x_of(1, FEATURES, seed=3)
    assert run(lambda x: x * table, [x_of()], RestConfig())[2] == table.nbytes
    small = x_of(16, 16)
    assert run(lambda x: x * x, [small], RestConfig())[2] == small.nbytes
    assert run(lambda x: x * x, [small], RestConfig(min_elements=64))[2] < small.nbytes


def test_packing_apart_holds_for_what_runs_inside():
    x = x_of().requires_grad_()
    with saved_memory() as saved, packing(RestConfig(product=None)):
        with packing_apart(RestConfig(product=8)):
            first = (y := x * 1.0) * y
        second = (z := x * 2.0) * z
    ranges, mean = ROWS * 2 * 4, 2 * FEATURES  # a square is kept in rows, without their mean
    assert saved.activations == ROWS * FEATURES + ranges + mean + z.nbytes
    del first, second, y, z


def test_autocast_keeps_no_weight_in_few_bits():
    layer = nn.Linear(FEATURES, FEATURES)
    x = x_of()

    def step(config):
        own = x.clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if config is None:
                out = F.silu(layer(own * 1.0))
            else:
                with packing(config):
                    out = F.silu(layer(own * 1.0))
        out.float().sum().backward()
        return out, own.grad

    exact, exact_grad = step(None)
    out, grad = step(RestConfig(pointwise=None, product=2))
    assert torch.equal(out, exact)
    assert torch.equal(grad, exact_grad)  # it depends on the weight alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["gelu", "a * b", "layer_norm", "attention", "dropout", "cross_entropy", "relu"])
def test_other_types(name, dtype):
    function, inputs = ALL[name]
    inputs = [each.to(dtype) for each in inputs]
    if dtype == torch.float64 and name == "layer_norm":
        inputs = [each + 1 for each in inputs]
    exact_out, exact, before = run(function, inputs)
    out, grads, after = run(function, inputs, RestConfig.of(8))
    assert torch.equal(out, exact_out)
    assert after < before
    for grad, other in zip(grads, exact, strict=True):
        assert grad.dtype == dtype
        assert (grad - other).double().square().sum() <= 2e-3 * other.double().square().sum()


@pytest.mark.parametrize(
    "view",
    {
        "transposed": lambda x: x.t(),
        "some columns": lambda x: x[:, 32:160],
        "every other column": lambda x: x[:, ::2],
        "expanded": lambda x: x[:, None, :64].expand(-1, 3, -1),
        "heads": lambda x: x.view(4, 16, 6, 32).transpose(1, 2),
        "reversed": lambda x: x.flip(1),
        "odd": lambda x: x[1:, 1:].contiguous(),
    }.items(),
    ids=lambda item: item[0],
)
def test_every_layout_comes_back_in_its_place(view):
    def function(x):
        return view[1](x) * view[1](x)

    _, (exact,), _ = run(function, [x_of()])
    out, (grad,), _ = run(function, [x_of()], EIGHT)
    assert (grad - exact).square().sum() < 1e-4 * exact.square().sum()
    assert torch.equal(out, run(function, [x_of()])[0])


def test_an_operation_can_be_registered():
    assert torch.special.i0e not in OPERATIONS
    before = run(torch.special.i0e, [x_of()], RestConfig())[2]
    register_operation(torch.special.i0e, FewBits("other"))
    try:
        assert run(torch.special.i0e, [x_of()], RestConfig())[2] < 0.3 * before
    finally:
        del OPERATIONS[torch.special.i0e]
    with pytest.raises(TypeError, match="rule must be a rule"):
        register_operation(torch.special.i0e, "other")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="function must be"):
        register_operation("i0e", FewBits("other"))  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [lambda x: x.amax(-1), lambda x: x.abs().log(), lambda x: x / (1 + x * x)])
def test_what_rounding_would_ruin_stays_as_it_is(function):
    _, (exact,), _ = run(function, [x_of()])
    _, (grad,), _ = run(function, [x_of()], RestConfig(product=8))
    assert (grad - exact).square().sum() <= 1e-3 * exact.square().sum()

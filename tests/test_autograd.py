"""Algorithm 1: what is exact, what is unbiased, and what is kept."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from backsketch import SketchConfig, saved_memory, sketch_, sketched_linear, valid_rows
from backsketch.linear import algorithm
from backsketch.sketches import make_sketch
from cases import (
    FORMS,
    KINDS,
    RATIOS,
    every_config,
    gradients,
    saved_storages,
    within_five_standard_errors,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FEATURES, OUTPUTS = 12, 9

INPUTS = {
    "1-D": lambda: torch.randn(FEATURES),
    "2-D": lambda: torch.randn(30, FEATURES),
    "3-D": lambda: torch.randn(5, 6, FEATURES),
    "4-D": lambda: torch.randn(2, 3, 5, FEATURES),
    "transposed": lambda: torch.randn(6, 5, FEATURES).transpose(0, 1),
    "column-major": lambda: torch.randn(FEATURES, 30).t(),
    "strided": lambda: torch.randn(30, 2 * FEATURES)[:, ::2],
    "expanded": lambda: torch.randn(1, 6, FEATURES).expand(5, 6, FEATURES),
    "empty": lambda: torch.randn(0, FEATURES),
    "empty 3-D": lambda: torch.randn(4, 0, FEATURES),
    "one row": lambda: torch.randn(1, FEATURES),
    "two rows": lambda: torch.randn(2, FEATURES),
}


def problem(x, dtype=torch.float32, bias=True, expanded_gradient=False):
    x = x.to(dtype)
    weight = torch.randn(OUTPUTS, FEATURES, dtype=dtype)
    grad_out = torch.randn(*x.shape[:-1], OUTPUTS, dtype=dtype)
    if expanded_gradient:
        grad_out = torch.ones((), dtype=dtype).expand(grad_out.shape)
    return x, weight, torch.randn(OUTPUTS, dtype=dtype) if bias else None, grad_out


def with_config(config):
    return lambda x, weight, bias: sketched_linear(x, weight, bias, config)


@pytest.fixture
def seed(monkeypatch):
    """Fix the seed of the next sketches, so that a test can rebuild S."""
    monkeypatch.setattr(algorithm, "draw_seed", lambda device: torch.tensor(123))
    return 123


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("kind", "block"), FORMS)
def test_output_input_gradient_and_bias_gradient_are_bit_for_bit_those_of_linear(kind, block, ratio, dtype):
    config = SketchConfig(kind=kind, block=block, ratio=ratio)
    for make in INPUTS.values():
        for bias in (True, False):
            for expanded in (False, True):
                case = problem(make(), dtype, bias, expanded)
                exact, ours = gradients(F.linear, *case), gradients(with_config(config), *case)
                for name, expected, actual in zip(("out", "dx", "dw", "db"), exact, ours, strict=True):
                    if expected is not None:
                        assert actual.dtype == expected.dtype
                        assert actual.shape == expected.shape
                        assert torch.equal(actual, expected) or (name == "dw" and ratio < 1), name
                        assert actual.isfinite().all()


@pytest.mark.parametrize("name", ["2-D", "3-D", "transposed", "column-major"])
def test_the_input_gradient_has_the_layout_that_linear_gives_it(name):
    """Column-major in, column-major out: made by another product, which on some CPUs rounds otherwise."""
    x, weight, bias, grad_out = problem(INPUTS[name](), torch.float64)
    x.requires_grad_()
    weight.requires_grad_()
    sketched = with_config(SketchConfig(ratio=0.5))
    exact, ours = (torch.autograd.grad(f(x, weight, bias), x, grad_out)[0] for f in (F.linear, sketched))
    assert ours.stride() == exact.stride()
    assert torch.equal(ours, exact)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("kind", "block"), FORMS)
def test_weight_gradient_is_the_dense_oracle(kind, block, ratio, seed):
    config = SketchConfig(kind=kind, block=block, ratio=ratio)
    x, weight, bias, grad_out = problem(torch.randn(5, 7, FEATURES), torch.float64)
    _, _, grad_weight, _ = gradients(with_config(config), x, weight, bias, grad_out)
    s = make_sketch(kind, 35, config.dim_for(35), seed, block).project(torch.eye(35, dtype=torch.float64)).t()
    oracle = (s.t() @ grad_out.reshape(35, -1)).t() @ (s.t() @ x.reshape(35, -1))
    torch.testing.assert_close(grad_weight, oracle, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", every_config(ratio=0.25), ids=str)
def test_weight_gradient_is_unbiased(config, dtype):
    x, weight, _, grad_out = problem(torch.randn(26, FEATURES) + 1, dtype)
    samples = torch.stack([gradients(with_config(config), x, weight, None, grad_out)[2] for _ in range(400)])
    exact = grad_out.double().t() @ x.double()
    rounding = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps * exact.abs().max().item()
    assert within_five_standard_errors(samples, exact, rounding)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [*every_config(ratio=0.25), SketchConfig(ratio=1.0)], ids=str)
def test_autocast_is_that_of_linear(config, autocast):
    x, weight, bias, _ = problem(torch.randn(2, 13, FEATURES))
    grad_out = torch.randn(2, 13, OUTPUTS).to(autocast)

    def under_autocast(function):
        def run(*case):
            with torch.autocast("cpu", dtype=autocast):
                return function(*case)

        return run

    exact = gradients(under_autocast(F.linear), x, weight, bias, grad_out)
    runs = [gradients(under_autocast(with_config(config)), x, weight, bias, grad_out) for _ in range(300)]
    for index, name in enumerate(("out", "dx", "dw", "db")):
        assert runs[0][index].dtype == exact[index].dtype, name
        if name != "dw":
            assert torch.equal(runs[0][index], exact[index]), name
    rounding = 2 * torch.finfo(autocast).eps * exact[2].abs().max().item()
    assert within_five_standard_errors(torch.stack([run[2] for run in runs]), exact[2].double(), rounding)


@pytest.mark.parametrize("x", [torch.float64, torch.float32, torch.int64])
@pytest.mark.parametrize("weight", [torch.float64, torch.float32])
def test_autocast_casts_what_it_casts_for_linear_and_no_more(x, weight):
    x, weight = torch.ones(10, FEATURES, dtype=x), torch.randn(OUTPUTS, FEATURES, dtype=weight, requires_grad=True)
    outcomes: list[object] = []
    for function in (F.linear, sketched_linear):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            try:
                outcomes.append(function(x, weight).dtype)
            except RuntimeError as error:
                outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_autocast_keeps_half_the_bytes_and_leaves_no_detached_weight_in_its_cache():
    x, weight = torch.randn(40, FEATURES), torch.randn(OUTPUTS, FEATURES, requires_grad=True)
    config = SketchConfig(ratio=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = saved_storages(lambda: sketched_linear(x.clone().requires_grad_(), weight, None, config))
        sketched_linear(x, weight, None, config)
        after = F.linear(x, weight)
    kept.pop(weight.untyped_storage().data_ptr())
    assert sorted(kept.values()) == [8, 20 * FEATURES * 2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = F.linear(x, weight)
    grads = [torch.autograd.grad(out.sum(), weight)[0] for out in (after, alone)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 40, 133])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("kind", "block"), FORMS)
def test_bytes_kept_are_the_kept_rows_and_a_seed(kind, block, ratio, rows, dtype):
    config = SketchConfig(kind=kind, block=block, ratio=ratio)
    x, weight, bias, _ = problem(torch.randn(rows, FEATURES), dtype)
    weight.requires_grad_()
    kept = saved_storages(lambda: sketched_linear(x.requires_grad_(), weight, bias.requires_grad_(), config))
    assert kept.pop(weight.untyped_storage().data_ptr()) == weight.nbytes
    seed = [] if config.keeps_input(rows) else [8]  # an input kept whole needs none
    assert sorted(kept.values()) == sorted([config.dim_for(rows) * FEATURES * dtype.itemsize, *seed])


def test_nothing_is_kept_without_a_weight_gradient():
    x, weight, bias, _ = problem(torch.randn(40, FEATURES))
    for run in (
        lambda: sketched_linear(x, weight, bias),
        lambda: sketched_linear(x.clone().requires_grad_(), weight, bias),
        lambda: torch.no_grad()(sketched_linear)(x, weight.clone().requires_grad_(), bias),
    ):
        kept = saved_storages(run)
        kept.pop(weight.untyped_storage().data_ptr(), None)
        assert not kept


def test_a_frozen_weight_runs_plain_linear():
    x, weight, bias, _ = problem(torch.randn(40, FEATURES))
    out = sketched_linear(x.requires_grad_(), weight, bias)
    assert type(out.grad_fn).__name__ == type(F.linear(x, weight, bias).grad_fn).__name__


def test_only_the_gradients_asked_for_are_computed():
    x, weight, bias, _ = problem(torch.randn(40, FEATURES))
    weight.requires_grad_()
    sketched_linear(x, weight, bias).sum().backward()
    assert weight.grad is not None
    assert x.grad is None
    assert bias.grad is None


@pytest.mark.parametrize("config", every_config(ratio=0.3), ids=str)
def test_every_step_and_layer_has_its_own_sketch_and_manual_seed_reproduces_them(config):
    case = problem(torch.randn(40, FEATURES))

    def steps():
        torch.manual_seed(5)
        return [gradients(with_config(config), *case)[2] for _ in range(3)]

    first, again = steps(), steps()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), min_size=0, max_size=3),
    features=st.integers(1, 9),
    ratio=st.floats(0.01, 1.0),
    block=st.none() | st.integers(1, 9),
    min_dim=st.integers(1, 12),
)
def test_any_shape_gives_the_right_shapes_and_no_nan(kind, shape, features, ratio, block, min_dim):
    config = SketchConfig(kind=kind, ratio=ratio, block=block, min_dim=min_dim)
    x, weight = torch.randn(*shape, features), torch.randn(4, features)
    case = (x, weight, torch.randn(4), torch.randn(*shape, 4))
    exact, ours = gradients(F.linear, *case), gradients(with_config(config), *case)
    for expected, actual in zip(exact, ours, strict=True):
        assert actual.shape == expected.shape
        assert actual.isfinite().all()
    rows = shape_rows(shape)
    if rows <= min_dim:  # too small to compress: kept whole, exact
        assert torch.equal(ours[2], exact[2])
    if rows == 0:
        assert not ours[2].any()


def shape_rows(shape):
    return torch.Size(shape).numel()


def test_no_features_gives_an_empty_gradient():
    weight = torch.randn(4, 0, requires_grad=True)
    sketched_linear(torch.randn(10, 0), weight).sum().backward()
    assert weight.grad.shape == (4, 0)


@pytest.mark.parametrize("config", [0.5, {"ratio": 0.5}, "rows"])
def test_what_is_not_a_config_is_refused(config):
    with pytest.raises(TypeError, match="config must be a SketchConfig, got"):
        sketched_linear(torch.randn(10, 3), torch.randn(4, 3, requires_grad=True), None, config)


@pytest.mark.parametrize(("x", "weight"), [((), (4, 1)), ((10, 3), (3,))])
def test_shapes_without_rows_or_outputs_are_refused(x, weight):
    with pytest.raises(ValueError, match=r"and weight .*, got shapes"):
        sketched_linear(torch.randn(x), torch.randn(weight, requires_grad=True))


def test_inputs_whose_rows_do_not_lie_in_memory_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(5, 6)], layout=torch.jagged)
    for x, layout in ((torch.eye(6).to_sparse(), "sparse_coo"), (nested, "jagged")):
        with pytest.raises(TypeError, match=f"dense tensor to be sketched, got .* torch.{layout}"):
            sketched_linear(x, torch.randn(4, 6, requires_grad=True))


def test_complex_weights_are_refused():
    weight = torch.randn(4, 3, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(TypeError, match="weight must be of a real floating-point type"):
        sketched_linear(torch.randn(10, 3, dtype=torch.complex64), weight)


def test_the_weight_is_held_only_for_the_input_gradient():
    weight = torch.randn(OUTPUTS, FEATURES, requires_grad=True)
    kept = saved_storages(lambda: sketched_linear(torch.randn(40, FEATURES), weight, None, SketchConfig(ratio=0.5)))
    assert sorted(kept.values()) == [8, 20 * FEATURES * 4]


def test_double_backward_is_refused_in_words():
    x, weight, _, _ = problem(torch.randn(40, FEATURES))
    weight.requires_grad_()
    out = sketched_linear(x.requires_grad_(), weight).square().sum()
    (grad,) = torch.autograd.grad(out, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="a sketched layer cannot be differentiated twice"):
        grad.sum().backward()


class Critic(nn.Module):
    """A critic with a gradient penalty: the gradient of its output is a constant, and that of its input is not."""

    def __init__(self, head):
        super().__init__()
        self.body, self.head = nn.Conv1d(3, 4, 3), nn.Linear(4 * 6, 1) if head else nn.Linear(4 * 6, 5)
        self.last = nn.Identity() if head else nn.Linear(5, 1)

    def forward(self, x):
        return self.last(F.softplus(self.head(self.body(x).flatten(1))))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("head", [True, False])
def test_a_gradient_penalty_trains_every_layer(head, autocast):
    """∂x is exact and so is its derivative; what reaches the weights through the output as well is unbiased."""
    model, x = Critic(head), torch.randn(20, 3, 8, requires_grad=True)

    def penalty_gradients():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    exact = [gradient.clone() for gradient in penalty_gradients()]
    sketch_(model, SketchConfig(ratio=0.5))
    draws = [[gradient.clone() for gradient in penalty_gradients()] for _ in range(200)]
    for layer, expected in enumerate(exact):
        shares = [(draw[layer] * expected).sum() / expected.square().sum() for draw in draws]
        assert within_five_standard_errors(torch.stack(shares), 1, rounding=0.05 if autocast else 1e-5)


def second_derivatives(run):
    """Yield, for each way to differentiate a gradient of W again, the function that does it."""
    weight = torch.randn(4, FEATURES, requires_grad=True)
    before = torch.randn(FEATURES, FEATURES, requires_grad=True)
    x = torch.randn(40, FEATURES)
    hidden = F.gelu(x @ before)
    for power in (1, 2):  # the gradient of the output is constant, or is not
        out = run(hidden, weight).pow(power).sum()
        grad, _ = torch.autograd.grad(out, (weight, before), create_graph=True)
        yield lambda grad=grad: torch.autograd.grad(grad.square().sum(), before, retain_graph=True)
        yield lambda grad=grad: grad.square().sum().backward(retain_graph=True)
        if power == 2:
            yield lambda grad=grad: torch.autograd.grad(grad.square().sum(), weight, retain_graph=True)


def test_the_weight_gradient_is_differentiated_nowhere():
    config = SketchConfig(ratio=0.5, bits=4)
    for differentiate in second_derivatives(F.linear):
        differentiate()
    for differentiate in second_derivatives(lambda x, weight: sketched_linear(x, weight, None, config)):
        with pytest.raises(RuntimeError, match="a sketched layer cannot be differentiated twice"):
            differentiate()


def test_the_weight_gradient_of_torch_func_is_differentiated_by_autograd_neither():
    weight, before = torch.randn(4, FEATURES, requires_grad=True), torch.randn(FEATURES, FEATURES, requires_grad=True)
    x = torch.randn(40, FEATURES)

    def loss(weight, before):
        return sketched_linear(F.gelu(x @ before), weight, None, SketchConfig(ratio=0.5)).sum()

    grad = torch.func.grad(loss)(weight, before)
    with pytest.raises(RuntimeError, match="a sketched layer cannot be differentiated twice"):
        torch.autograd.grad(grad.square().sum(), before)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": nn.ReLU(inplace=True),
    "Dropout": nn.Dropout(0.5, inplace=True),
    "+=": lambda h: h.add_(1),
    "[] =": lambda h: h.index_put_((torch.tensor([0]),), torch.zeros(())),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shape", [(FEATURES,), (4, FEATURES), (2, 3, FEATURES), (2, 2, 3, FEATURES)])
@pytest.mark.parametrize("bias", [False, True])
def test_an_output_can_be_changed_in_place(change, shape, bias):
    layer, x = nn.Linear(FEATURES, 5, bias=bias), torch.randn(shape, requires_grad=True)
    found = []
    for converted in (False, True):
        if converted:
            sketch_(layer, SketchConfig(ratio=0.5))
            layer.weight.requires_grad_()
        torch.manual_seed(1)
        out = layer(x)
        torch.manual_seed(2)
        changed = CHANGES[change](out)
        (grad,) = torch.autograd.grad(changed.square().sum(), x)
        found.append((changed, grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_torch_jit_is_refused_in_words():
    model, x = sketch_(nn.Sequential(nn.Linear(FEATURES, 5)), SketchConfig(ratio=0.5)), torch.randn(40, FEATURES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(RuntimeError, match=r"torch.jit.script cannot compile a sketched model: call backsketch"):
            torch.jit.script(model)
        with pytest.raises(RuntimeError, match=r"torch.jit.trace would freeze the random numbers"):
            torch.jit.trace(model, x)
        traced = torch.jit.trace(model.eval(), x)
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="torch 2.6 does not tell that it exports")
def test_torch_export_of_a_training_model_is_refused_in_words():
    model, x = sketch_(nn.Sequential(nn.Linear(FEATURES, 5)), SketchConfig(ratio=0.5)), torch.randn(40, FEATURES)
    for strict in (False, True):
        with pytest.raises(Exception, match=r"torch.export would lose the gradient of a sketched layer"):
            torch.export.export(model, (x,), strict=strict)
    torch.testing.assert_close(torch.export.export(model.eval(), (x,)).module()(x), model(x))


def test_a_gradient_that_can_be_differentiated_can_be_changed_in_place():
    weight = torch.randn(5, FEATURES, requires_grad=True)
    out = sketched_linear(torch.randn(40, FEATURES, requires_grad=True), weight, None, SketchConfig(ratio=0.5))
    (grad,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    grad.mul_(2)


@pytest.mark.parametrize("config", every_config(0.25, center=True) + every_config(0.25, bits=4), ids=str)
def test_fake_tensors_have_the_shapes_of_a_step(config):
    """FakeTensorMode follows a step without values; what is kept has the bytes that it really takes."""
    model, x = sketch_(nn.Linear(FEATURES, 5), config), torch.randn(2, 20, FEATURES)
    kept = saved_storages(lambda: model(x.clone().requires_grad_()))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake, x = sketch_(nn.Linear(FEATURES, 5), config), torch.randn(2, 20, FEATURES, requires_grad=True)
        with saved_memory(fake) as saved, valid_rows(torch.ones(2, 20)):
            out = fake(x)
        mask = 40
        assert saved.activations == sum(kept.values()) - model.weight.nbytes + mask
        out.sum().backward()
        assert fake.weight.grad.shape == fake.weight.shape
        assert x.grad.shape == x.shape


def test_wrong_shapes_and_dtypes_get_linears_own_errors():
    weight = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        sketched_linear(torch.randn(10, 5), weight)
    with pytest.raises(RuntimeError, match="dtype"):
        sketched_linear(torch.randn(10, 3).double(), weight)


def test_an_input_changed_in_place_afterwards_does_not_matter_to_a_compressed_layer():
    """nn.Linear must refuse here, since it kept x itself; the kept rows are a copy."""
    x, weight, _, grad_out = problem(torch.randn(40, FEATURES))
    weight.requires_grad_()
    grads = []
    for change in (x.clone, x.zero_):
        torch.manual_seed(1)
        out = sketched_linear(x, weight, None, SketchConfig(ratio=0.5))
        change()
        grads.append(torch.autograd.grad(out, weight, grad_out)[0])
    assert torch.equal(*grads)

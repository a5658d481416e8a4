"""torch.compile: one graph, the right gradient, and nothing more kept than eager keeps."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch._functorch.config as partitioner
from torch import nn
from torch.utils.checkpoint import checkpoint

from backsketch import SketchConfig, SketchedLinear, sketch_, sketched_linear, unsketch_, valid_rows
from backsketch.linear import compiled_operators as ops
from backsketch.masks.scopes import in_force
from cases import every_config, gradients, saved_storages, within_five_standard_errors

pytestmark = [  # torch warns of what its own compiler does
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

ROWS, FEATURES, OUTPUTS = 48, 24, 16
SAMPLES = 300
BACKENDS = ["aot_eager", "inductor"]
MIN_CUT = "aot_eager_decomp_partition"  # inductor's partitioner without its code generation
HEADS = {  # all together smaller than the input, or the compiler would keep that instead
    f"{kind} {bits}": SketchConfig(kind=kind, ratio=0.15, bits=bits, center=bits == 8, rotate=bits == 3)
    for kind in ("rows", "gaussian", "hadamard")
    for bits in (None, 3, 8)
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Heads(nn.Module):
    """One layer for every config, all reading one input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict(
            {name: SketchedLinear(FEATURES, OUTPUTS, config=config) for name, config in HEADS.items()}
        )

    def forward(self, x):
        return torch.stack([layer(x) for layer in self.layers.values()])


class Chain(nn.Module):
    """Layers in a row, with something nonlinear in between that needs its own input in backward."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x, attention_mask=None):
        return checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)

    def layers(self, x):
        return self.third(torch.sin(self.second(torch.sin(self.first(x)))))


def compiled(model, backend, **options):
    return torch.compile(model, fullgraph=True, backend=backend, **options)


def run(call, model, x, grad_out):
    """Return the output, ∂x, and the gradients of the parameters by name."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x)
    out.backward(grad_out)
    return out.detach(), x.grad, {name: parameter.grad for name, parameter in model.named_parameters()}


def activations(call, model, *args):
    """Return the bytes of every storage held for backward beside the parameters, largest first."""
    held = saved_storages(lambda: call(*args))
    for parameter in model.parameters():
        held.pop(parameter.untyped_storage().data_ptr(), None)
    return sorted(held.values(), reverse=True)


def check_unbiased(call, model, samples=SAMPLES):
    """Assert that the output, ∂x and ∂b are exact and that the mean ∂W has a projection of 1 on the exact one."""
    exact = unsketch_(copy.deepcopy(model))
    x = torch.randn(ROWS, FEATURES) + 0.5
    grad_out = torch.randn_like(exact(x))
    out, grad_x, expected = run(exact, exact, x, grad_out)
    runs = [run(call, model, x, grad_out) for _ in range(samples)]
    torch.testing.assert_close(runs[0][0], out)
    torch.testing.assert_close(runs[0][1], grad_x, rtol=1e-4, atol=1e-4)
    for name, gradient in expected.items():
        estimates = torch.stack([estimate[name] for _, _, estimate in runs])
        if name.endswith("bias"):
            torch.testing.assert_close(estimates[0], gradient, rtol=1e-4, atol=1e-4)
            continue
        projection = (estimates * gradient).flatten(1).sum(1) / gradient.square().sum()
        assert projection.std() > 0, f"{name} has no noise: every step has the same sketch, or none"
        assert within_five_standard_errors(projection, 1.0, rounding=1e-3), f"{name}: {projection.mean()}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_gradients_are_unbiased_and_all_else_is_exact(backend):
    model = Heads()
    check_unbiased(compiled(model, backend), model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_saves_what_eager_saves(backend):
    model = Heads()
    x = torch.randn(ROWS, FEATURES)
    eager, ours = activations(model, model, x), activations(compiled(model, backend), model, x)
    assert sum(ours) == pytest.approx(sum(eager), rel=0.05)
    assert max(ours) < x.nbytes


@pytest.mark.parametrize("config", every_config(ratio=0.25, bits=4, center=True), ids=str)
def test_every_kind_compiles_and_saves_what_eager_saves(config):
    layer = SketchedLinear(FEATURES, OUTPUTS, config=config)
    x = torch.randn(4, ROWS // 4, FEATURES)
    call = compiled(layer, "aot_eager")
    assert activations(call, layer, x) == activations(layer, layer, x)
    call(x).sum().backward()
    assert layer.weight.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [None, 4])
def test_batch_sizes_do_not_recompile(backend, bits):
    config = SketchConfig(ratio=0.25, bits=bits, center=bits is not None, min_dim=8, max_dim=20)
    layer = SketchedLinear(FEATURES, OUTPUTS, config=config)
    call = compiled(layer, backend, dynamic=True)
    call(torch.randn(ROWS, FEATURES)).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (17, 64, 33, 6, 200):  # among them too few rows to compress, and more than max_dim allows
            x = torch.randn(rows, FEATURES)
            ours, eager = sum(activations(call, layer, x)), sum(activations(layer, layer, x))
            assert ours == pytest.approx(eager, rel=0.05, abs=96)
            layer.zero_grad()
            call(x).sum().backward()
            assert layer.weight.grad.isfinite().all()
            first = layer.weight.grad.select(0, 0)
            assert rows > 8 or torch.allclose(first, x.sum(0), atol=1e-4 if bits is None else 2)


@pytest.mark.parametrize("dynamic", [None, True])
def test_layers_compiled_one_by_one_may_differ_in_every_number(dynamic):
    x = torch.randn(ROWS, FEATURES)
    exact = x.sum(0).expand(OUTPUTS, FEATURES)
    configs = [
        *(SketchConfig(ratio=1.0, bits=bits) for bits in (8, 4)),
        *(SketchConfig(dim=dim) for dim in (ROWS, ROWS + 1)),
        *(SketchConfig(min_dim=dim) for dim in (ROWS, ROWS + 1)),
    ]
    for config in configs:
        layer = SketchedLinear(FEATURES, OUTPUTS, config=config)
        compiled(layer, "aot_eager", dynamic=dynamic)(x).sum().backward()
        error = layer.weight.grad.sub(exact).norm() / exact.norm()
        least, most = {8: (1e-4, 0.05), 4: (0.02, 0.5), None: (0, 1e-6)}[config.bits]
        assert least <= error <= most


def test_the_default_config_is_there_in_a_graph():
    x, weight = torch.randn(ROWS, FEATURES), torch.randn(OUTPUTS, FEATURES, requires_grad=True)
    compiled(sketched_linear, "aot_eager")(x, weight).sum().backward()
    exact = x.sum(0).expand(OUTPUTS, FEATURES)
    assert 0.05 <= weight.grad.sub(exact).norm() / exact.norm() <= 2


def test_the_traced_size_is_the_real_one_for_every_number_of_rows():
    """Half a row rounds to even: the symbolic size must round as the number does."""
    config = SketchConfig(ratio=0.1, min_dim=2, max_dim=9)
    sizes = compiled(lambda x: x.new_zeros(config.dim_for(x.shape[0])), "eager", dynamic=True)
    sizes(torch.zeros(12))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert [len(sizes(torch.zeros(rows))) for rows in range(2, 120)] == [
            config.dim_for(rows) for rows in range(2, 120)
        ]


@pytest.mark.parametrize("budget", [0.3, 0.0])
def test_a_memory_budget_recomputes_seed_and_rows_together(budget):
    """Keeping the seed of one draw and the rows of another would make E[∂W] zero."""
    model = sketch_(Chain(), SketchConfig(ratio=0.25))
    with partitioner.patch(activation_memory_budget=1.0):
        full = activations(compiled(model, MIN_CUT), model, torch.randn(ROWS, FEATURES))
    torch._dynamo.reset()
    with partitioner.patch(activation_memory_budget=budget):
        call = compiled(model, MIN_CUT)
        assert sum(activations(call, model, torch.randn(ROWS, FEATURES))) < sum(full)
        check_unbiased(call, model)


@pytest.mark.parametrize("backend", [MIN_CUT, "inductor"])
def test_a_memory_budget_keeps_the_sketch_and_not_the_input(backend):
    layer = SketchedLinear(FEATURES, OUTPUTS, config=SketchConfig(ratio=0.25))
    with partitioner.patch(activation_memory_budget=0.3):
        held = activations(compiled(layer, backend), layer, torch.randn(ROWS, FEATURES))
    assert held == [ROWS // 4 * FEATURES * 4, 8]


def test_a_memory_budget_of_zero_keeps_the_inputs_of_the_graph_alone():
    """That is how torch defines it. The inputs of the layers inside are not among them."""
    model = sketch_(Chain(), SketchConfig(ratio=0.25))
    x = torch.randn(ROWS, FEATURES)
    with partitioner.patch(activation_memory_budget=0.0):
        assert activations(compiled(model, MIN_CUT), model, x) == [x.nbytes]


@pytest.mark.parametrize("ratio", [0.25, 1.0])
def test_compiled_autograd_runs_the_backward_of_eager_layers(ratio):
    from torch._dynamo.compiled_autograd import _enable

    model, x = sketch_(Chain(), SketchConfig(ratio=ratio)), torch.randn(32, FEATURES)
    gradients = []
    for compiled in (False, True):
        model.zero_grad()
        torch.manual_seed(3)
        with _enable(torch.compile(backend="eager")) if compiled else nullcontext():
            model(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_checkpointing_inside_a_compiled_model():
    model = sketch_(Chain(checkpointed=True), SketchConfig(ratio=0.25))
    call = compiled(model, "aot_eager")
    assert activations(call, model, torch.randn(ROWS, FEATURES)) == [ROWS * FEATURES * 4]
    check_unbiased(call, model)


@pytest.mark.parametrize("backend", ["aot_eager", MIN_CUT])
def test_layers_that_read_one_tensor_keep_one_sketch(backend):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(FEATURES, FEATURES) for _ in range(3))

        def forward(self, x):
            return self.query(x) + self.key(x) + self.value(x)

    model = sketch_(Attention(), SketchConfig(ratio=0.25))
    call = compiled(model, backend)
    x = torch.randn(ROWS, FEATURES)
    assert activations(call, model, x) == [ROWS // 4 * FEATURES * 4, 8]
    check_unbiased(call, model)


def test_autocast_inside_a_compiled_graph():
    layer = SketchedLinear(FEATURES, OUTPUTS, config=SketchConfig(ratio=0.25))
    call = compiled(layer, "aot_eager")

    def half(function):
        def under_autocast(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(x)

        return under_autocast

    x, grad_out = torch.randn(ROWS, FEATURES), torch.randn(ROWS, OUTPUTS).bfloat16()
    assert activations(half(call), layer, x)[0] == ROWS // 4 * FEATURES * 2
    outcomes = []
    for function in (half(layer), half(call)):
        torch.manual_seed(3)
        outcomes.append(run(function, layer, x, grad_out))
    torch.testing.assert_close(*outcomes)


@pytest.mark.parametrize("config", [SketchConfig(kind="gaussian", ratio=0.25), HEADS["rows 3"], HEADS["hadamard 8"]])
def test_every_step_has_its_own_sketch_and_manual_seed_reproduces_them(config):
    layer = SketchedLinear(FEATURES, OUTPUTS, config=config)
    call = compiled(layer, "aot_eager")
    x, grad_out = torch.randn(ROWS, FEATURES), torch.randn(ROWS, OUTPUTS)

    def steps(function):
        torch.manual_seed(5)
        return [run(function, layer, x, grad_out)[2]["weight"] for _ in range(3)]

    first, again, eager = steps(call), steps(call), steps(layer)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    torch.testing.assert_close(first, eager, rtol=0, atol=0)
    assert not torch.allclose(first[0], first[1])


def test_eval_no_grad_and_a_full_ratio_are_plain_linear():
    x = torch.randn(ROWS, FEATURES)
    layer = SketchedLinear(FEATURES, OUTPUTS, config=SketchConfig(ratio=0.25))
    whole = SketchedLinear(FEATURES, OUTPUTS, config=SketchConfig(ratio=1.0))
    state = torch.get_rng_state()
    compiled(whole, "aot_eager")(x).sum().backward()
    with torch.no_grad():
        compiled(layer, "aot_eager")(x)
    out = compiled(layer.eval(), "aot_eager")(x)
    torch.testing.assert_close(out, nn.functional.linear(x, layer.weight, layer.bias))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(whole.weight.grad, x.sum(0).expand(OUTPUTS, FEATURES))


def test_masks_do_nothing_to_compiled_layers_and_leave_nothing_behind():
    model = sketch_(Chain(), SketchConfig(ratio=0.25))
    mask = torch.arange(ROWS).expand(1, ROWS) < ROWS // 2
    call = compiled(model, "aot_eager")
    with valid_rows(mask):
        check_unbiased(lambda x: call(x.unsqueeze(0), attention_mask=mask.long())[0], model)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def inside(x):
        with valid_rows(mask):
            return model(x)

    check_unbiased(inside, model, samples=50)
    assert in_force.innermost is None


def test_a_failed_compilation_lifts_no_mask_that_it_did_not_set():
    class Broken(Chain):
        def forward(self, x, attention_mask=None):
            print("a graph break")
            return self.layers(x)

    model = sketch_(Broken(), SketchConfig(ratio=0.25))
    mask = torch.ones(1, ROWS, dtype=torch.long)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(model, "aot_eager")(torch.randn(1, ROWS, FEATURES), attention_mask=mask)
    assert in_force.innermost is None


def test_graph_breaks_around_layers_are_harmless():
    class Breaking(Chain):
        def layers(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.third(torch.sin(self.second(torch.sin(x))))

    model = sketch_(Breaking(), SketchConfig(ratio=0.25))
    check_unbiased(torch.compile(model, backend="aot_eager"), model)


def test_the_operators_take_every_field_of_a_config():
    """A field that is forgotten there would be at its default in every compiled layer."""
    config = SketchConfig(kind="hash", dim=3, min_dim=2, max_dim=9, block=4, bits=8, center=True)
    for each in (config, SketchConfig(ratio=0.3), pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert ops._config(each.as_json) == each


@pytest.mark.parametrize("config", list(HEADS.values()), ids=list(HEADS))
def test_the_operators_are_what_they_say(config):
    checks = ("test_schema", "test_faketensor")
    for rows in (1, 2, ROWS):
        x, y = torch.randn(rows, FEATURES), torch.randn(rows, OUTPUTS)
        torch.library.opcheck(ops._keep, (x, config.as_json), test_utils=checks)
        torch.library.opcheck(ops._keep, (torch.randn(FEATURES, rows).t(), config.as_json), test_utils=checks)
        kept = ops._keep(x, config.as_json)
        torch.library.opcheck(ops._weight_gradient, (kept, y, FEATURES, None, config.as_json), test_utils=checks)
        exact = gradients(nn.functional.linear, x, torch.randn(OUTPUTS, FEATURES), None, y)[2]
        if rows == 1 and config.bits is None:
            torch.testing.assert_close(ops._weight_gradient(kept, y, FEATURES, None, config.as_json), exact)

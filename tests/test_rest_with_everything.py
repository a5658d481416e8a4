"""sketch_(model, rest=...) with all else that trains a model: gradients are right, or an error says why not."""

import copy
import gc
import math
import pickle
import threading
import warnings
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from backsketch import RestConfig, SketchConfig, saved_memory, sketch_
from backsketch.linear import sharing
from backsketch.rest.packing_mode import _of_thread, packing
from backsketch.rest.saving import observe_saving
from backsketch.seeds import draw_seed
from backsketch.storage import packed_copies
from backsketch.torch_private import innermost_hooks
from cases import needs_shown_saves, within_five_standard_errors
from small import llama, roberta
from test_peft import Int8Linear

pytestmark = needs_shown_saves

ROWS, WIDTH = 24, 32
FEW = RestConfig(min_elements=64)
EIGHT = RestConfig(pointwise=8, product=8, min_elements=64)


class Block(nn.Module):
    """A norm, a gated branch and dropout, added to the input."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        hidden = self.norm(x)
        return x + self.dropout(self.down(F.silu(self.gate(hidden)) * self.up(hidden)))


class WrittenOutNorm(nn.Module):
    """A norm that saves its input twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def network(dropout=0.0):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(dropout), WrittenOutNorm(), Block(dropout), nn.GELU())


def rest(model, config=FEW):
    """Keep everything but the inputs of sketched layers in few bits: there are no sketched layers."""
    return sketch_(model, {"*": None}, rest=config)


def batch(*shape, seed=1, **options):
    return torch.randn(*shape or (ROWS, WIDTH), generator=torch.Generator().manual_seed(seed), **options)


def loss_of(out):
    return (out.float() * batch(*out.shape, seed=2)).sum() + out.float().square().sum()


def gradient(model, *inputs, run=None, seed=0, draw=False):
    """Return all gradients of one step as one vector; ``draw`` as many random numbers as packing would."""
    model.zero_grad()
    torch.manual_seed(seed)
    if draw:
        draw_seed()
    loss_of((run or model)(*inputs)).backward()
    return flat(model)


def flat(model):
    return torch.cat([each.grad.detach().flatten() for each in model.parameters() if each.grad is not None])


def is_close(found, exact, tolerance=1e-3):
    return (found - exact).double().square().sum() <= tolerance * exact.double().square().sum()


def packed_during(call):
    """Return how many tensors were packed, and how many saved."""
    kept = []
    with observe_saving(lambda family, tensor, kept_of_it: kept.append(kept_of_it)):
        call()
    return sum(each is not None for each in kept), len(kept)


def assert_nothing_is_on():
    assert _of_thread.step is None
    assert innermost_hooks() is None
    assert _get_current_function_mode_stack() == []
    x = batch().requires_grad_()
    with saved_memory() as saved:
        out = F.gelu(x * 1.0)
    assert saved.activations == x.nbytes
    del out


@pytest.fixture(autouse=True)
def nothing_stays_on():
    yield
    assert_nothing_is_on()


# Precision, accumulation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_under_autocast_are_unbiased(dtype):
    model, x = network(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)

    def step(seed):
        model.zero_grad()
        torch.manual_seed(seed)
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model(x))
        scaler.scale(loss).backward()
        return flat(model) / scaler.get_scale()

    exact = step(0)
    rest(model, RestConfig(pointwise=2, product=3, attention=None, norm=None, min_elements=64))
    samples = torch.stack([step(seed) @ exact / exact.square().sum() for seed in range(60)])
    assert samples.std() > 0
    assert within_five_standard_errors(samples, 1, 2 * torch.finfo(dtype).eps)


def test_the_scaler_skips_a_step_that_overflows_and_trains_in_fp16():
    model, x = rest(network()), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    losses, scales = [], []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), batch(seed=2))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    assert scales[-1] < scales[0]
    assert losses[-1] < losses[0]


def test_accumulated_gradients_are_the_sum_of_those_of_each_part():
    model, parts = rest(network()), batch(3, ROWS, WIDTH)
    alone = sum(gradient(model, part, seed=seed) for seed, part in enumerate(parts))
    model.zero_grad()
    for seed, part in enumerate(parts):
        torch.manual_seed(seed)
        loss_of(model(part)).backward()
    torch.testing.assert_close(flat(model), alone)


# Checkpoints

aten = torch.ops.aten
POLICY = [aten.mm.default, aten.addmm.default, aten.native_layer_norm.default]
WAYS = {
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, POLICY)
    ),
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("way", WAYS)
def test_inside_a_checkpoint_all_is_exact(way, dropout):
    model, x = network(dropout), batch().requires_grad_()
    plain = gradient(model, x, run=partial(WAYS[way], model))
    rest(model)
    found = []
    packed, _ = packed_during(lambda: found.append(gradient(model, x, run=partial(WAYS[way], model))))
    assert packed == 0
    assert torch.equal(found[0], plain)


class Checkpointed(nn.Module):
    """Checkpoints a block itself, as transformers does."""

    def __init__(self, way, dropout):
        super().__init__()
        self.first, self.block, self.last = nn.GELU(), network(dropout), nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x):
        return self.last(WAYS[self.way](self.block, self.first(x)))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_checkpoints_its_blocks_packs_around_them(way, dropout):
    model, x = Checkpointed(way, dropout), batch().requires_grad_()
    exact = gradient(model, x, draw=True)
    names = [name for name, _ in model.named_parameters()]
    sizes = [each.numel() for each in model.parameters()]
    rest(model)
    found = []
    packed, _ = packed_during(lambda: found.append(gradient(model, x)))
    assert packed == 2  # what GELU and the last layer save
    for name, grad, plain in zip(names, found[0].split(sizes), exact.split(sizes), strict=True):
        assert torch.equal(grad, plain) is (name != "last.weight"), name


def test_checkpointing_of_transformers():
    model, inputs = llama()
    model.gradient_checkpointing_enable()
    model.train()

    def step():
        model.zero_grad()
        torch.manual_seed(0)
        model(**inputs).loss.backward()
        return flat(model)

    exact = step()
    rest(model, EIGHT)
    found = step()
    assert is_close(found, exact)
    assert not torch.equal(found, exact)


# Hooks on saved tensors


def test_what_is_packed_can_be_offloaded():
    model, x = rest(network()), batch()
    inside = gradient(model, x)
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor.clone()

    def run(x):
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return model(x)

    assert torch.equal(gradient(model, x, run=run), inside)
    parameters = {each.data_ptr() for each in model.parameters()}
    activations = [each for each in seen if each.data_ptr() not in parameters and each.numel() >= ROWS * WIDTH / 4]
    assert {each.dtype for each in activations} == {torch.uint8}

    def offloaded(x):
        with save_on_cpu():
            return model(x)

    assert torch.equal(gradient(model, x, run=offloaded), inside)


class Reader(nn.Module):
    """A sketched layer that reads what a product before it keeps in few bits, and is multiplied by the same."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.first(x)
        square = hidden * hidden
        return self.layer(hidden) * square * hidden


def test_a_sketched_layer_takes_a_copy_that_is_there_offloaded_or_not():
    model, x = Reader(), batch()
    exact = gradient(model, x)
    sketch_(model, SketchConfig(ratio=0.5), rest=RestConfig(product=2, min_elements=64))

    def offloaded(x):
        with save_on_cpu():
            return model(x)

    samples = []
    for seed in range(200):
        found = gradient(model, x, seed=seed)
        samples.append((found @ exact) / exact.square().sum())
        if seed < 2:
            assert torch.equal(gradient(model, x, run=offloaded, seed=seed), found)
    assert within_five_standard_errors(torch.stack(samples), 1)


class HooksInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.seen: list[Tensor] = []

    def forward(self, x):
        x = self.net[1](self.net[0](x))
        with saved_tensors_hooks(lambda tensor: self.seen.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
            x = self.net[2](x)
        return self.net[4](self.net[3](x))


def test_hooks_inside_the_model_get_what_is_saved_inside_them():
    model, x = HooksInside(), batch()
    exact = gradient(model, x)
    rest(model, EIGHT)
    assert is_close(gradient(model, x), exact)
    assert any(each.is_floating_point() and each.numel() == x.numel() for each in model.seen)


# PEFT


@pytest.mark.parametrize("order", ["before", "after", "quantised"])
def test_adapters_train(order):
    model, x = nn.Sequential(Block(), Block()), batch()
    config = LoraConfig(target_modules=["gate", "down"], r=4, init_lora_weights=False, lora_dropout=0.2)
    if order == "quantised":
        for block in model:
            block.gate = Int8Linear(block.gate)
    exact = get_peft_model(copy.deepcopy(model), config)
    if order == "after":
        found = rest(get_peft_model(model, config), EIGHT)
    else:
        found = get_peft_model(rest(model, EIGHT), config)
    found.load_state_dict(exact.state_dict())
    grads = gradient(found, x)
    assert is_close(grads, gradient(exact, x, draw=True))
    assert packed_during(lambda: found(x))[0] > 0


@pytest.mark.parametrize("frozen", ["query", "key", "value"])
def test_attention_with_dropout_over_a_frozen_part(frozen):
    """What needs no gradient is no mask of dropout for that."""
    parts = {name: batch(2, 2, 16, 16, seed=seed) for seed, name in enumerate(("query", "key", "value"))}
    trained = {name: each.requires_grad_() for name, each in parts.items() if name != frozen}

    def step(config):
        torch.manual_seed(0)
        if config is None:
            draw_seed()
        with nullcontext() if config is None else packing(config):
            made = {name: each * 1.0 if each.requires_grad else each for name, each in parts.items()}
            out = F.scaled_dot_product_attention(made["query"], made["key"], made["value"], dropout_p=0.2)
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss_of(out), list(trained.values()))])

    assert is_close(step(EIGHT), step(None))


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_with_dropout(need_weights):
    heads = nn.MultiheadAttention(WIDTH, 2, dropout=0.2)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), heads), batch(16, 4, WIDTH)

    def run(x):
        hidden = model[0](x)
        return heads(hidden, hidden, hidden, need_weights=need_weights)[0]

    def packed(x):
        with packing(EIGHT):
            return run(x)

    exact = gradient(model, x, run=run, draw=True)
    assert is_close(gradient(model, x, run=packed), exact)


# Several passes


def test_two_backward_passes_give_the_same():
    model, x = rest(network()), batch()
    loss = loss_of(model(x))
    grads = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_model_called_twice_before_one_backward():
    model, x, y = network(), batch(), batch(seed=3)
    exact = gradient(model, x, run=lambda x: model(x) * model(y))
    rest(model, EIGHT)
    assert is_close(gradient(model, x, run=lambda x: model(x) * model(y)), exact)


class Same(torch.autograd.Function):
    """Returns its input, as the Functions do that hooks of modules and FSDP2 put around them."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out


TWICE_ON_A_PATH = {
    "x · x · x": lambda x: x * x * x,
    "the other way": lambda x: x * (x * x),
    "through a view": lambda x: (x.t() * x.t()).t() * x,
    "matrices": lambda x: (x @ x.t()) @ x,
    "exp": lambda x: (y := x.exp()) * y.sum(-1, keepdim=True).add(1).log() * y,
    "exp, squared": lambda x: (y := x.exp()) * y.view_as(y),
    "through windows": lambda x: (x * x.flip(0)).unfold(-1, 32, 32) * x.unfold(-1, 32, 32),
    "through a Function": lambda x: x * x.flip(0) * Same.apply(x),
}


@pytest.mark.parametrize("name", TWICE_ON_A_PATH)
def test_a_tensor_that_is_multiplied_twice_on_a_path_has_independent_copies(name):
    function = TWICE_ON_A_PATH[name]

    def step(config):
        x = (batch() / 4).requires_grad_()
        with nullcontext() if config is None else packing(config):
            out = function(x * 1.0)
        return torch.autograd.grad(out.sum(), x)[0].double()

    exact = step(None)
    samples = torch.stack([(step(RestConfig(product=2, min_elements=64)) - exact).sum() for _ in range(200)])
    assert samples.std() > 0
    assert within_five_standard_errors(samples, 0)


def test_values_of_attention_from_which_its_queries_are_made_have_independent_copies():
    x, keys, grad_out = (batch(8, 4, WIDTH, seed=seed) for seed in range(3))

    def heads(each):
        return each.unflatten(-1, (2, 16)).transpose(1, 2)

    def step(config):
        weight = batch(8, 4, WIDTH, seed=3).requires_grad_()
        with nullcontext() if config is None else packing(config):
            values = x.clone().requires_grad_() * 1.0
            queries = values * (weight * 1.0)
            out = F.scaled_dot_product_attention(heads(queries), heads(keys), heads(values), is_causal=True)
        return torch.autograd.grad(out, weight, heads(grad_out))[0].double()

    exact, config = step(None), RestConfig(product=2, min_elements=64)
    samples = torch.stack([((step(config) - exact) * keys * grad_out).sum() for _ in range(200)])
    assert samples.std() > 0
    assert within_five_standard_errors(samples, 0)


def second_derivative(function, config):
    x = batch().requires_grad_()
    with nullcontext() if config is None else packing(config):
        out = function(x * 1.0)
    (first,) = torch.autograd.grad((out * batch(seed=2)).sum(), x, create_graph=True)
    (first.square().sum() + x.pow(3).sum()).backward()
    return x.grad


TWICE: dict[str, Any] = {
    "product": lambda x: x * x * x.detach(),
    "matmul": lambda x: x @ x.t() @ x,
    "exp": torch.exp,
    "relu": lambda x: F.relu(x) * x,
    "clamp": lambda x: x.clamp(-1, 1) * x,
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "softmax": lambda x: x.softmax(-1),
}
ONCE: dict[str, Any] = {
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(ROWS)).expand(ROWS, WIDTH),
    "narrow norm": lambda x: F.layer_norm(x, (WIDTH,)),
}


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_are_right(name):
    exact = second_derivative(TWICE[name], None)
    assert is_close(second_derivative(TWICE[name], EIGHT), exact)


@pytest.mark.parametrize("name", ONCE)
def test_second_derivatives_are_refused_where_first_ones_are_kept(name):
    """Also if no gradient came in that could be differentiated, where torch alone would give zero."""
    config = RestConfig(norm=4, min_elements=64)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice .*unsketch_"):
        second_derivative(ONCE[name], config)
    x = batch().requires_grad_()
    with packing(config):
        out = ONCE[name](x * 1.0)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice .*unsketch_"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


# Other parts of torch


def test_transforms_of_a_model_are_refused_in_words():
    model, x = rest(network()), batch()
    with pytest.raises(RuntimeError, match=r"inside a transform of torch.func: call backsketch.unsketch_\(model\)"):
        torch.func.grad(lambda x: model(x).sum())(x)


class Mapped(nn.Module):
    def forward(self, x):
        heads = torch.vmap(lambda each: F.scaled_dot_product_attention(each, each, F.gelu(each)))(x.view(2, 2, -1, 8))
        return heads.reshape(x.shape) * x


def test_a_transform_inside_a_model_runs_as_ever():
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mapped()), batch()
    exact = gradient(model, x)
    assert is_close(gradient(rest(model, EIGHT), x), exact)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_trains_and_packs_nothing():
    torch._dynamo.reset()
    model, x = network(), batch()
    exact = gradient(model, x)
    call = torch.compile(rest(model), backend="aot_eager")
    found = []
    for _ in range(2):
        assert packed_during(lambda: found.append(gradient(model, x, run=call)))[0] == 0
        torch.testing.assert_close(found[-1], exact)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_part_of_a_model_trains(backend):
    torch._dynamo.reset()
    model, x = network(), batch()
    exact = gradient(model, x)
    rest(model, EIGHT)
    model[3] = torch.compile(model[3], backend=backend)
    for seed in range(3):  # a seed of one step must not be part of the graph
        assert is_close(gradient(model, x, seed=seed), exact)
    rest(model)
    grads = {seed: gradient(model, x, seed=seed) for seed in range(2)}
    assert not torch.equal(grads[0], grads[1])
    assert torch.equal(gradient(model, x, seed=0), grads[0])


# Errors


class Breaks(nn.Module):
    error: BaseException | None = None

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["between operations", "in an operation", "in a hook"])
def test_a_forward_that_breaks_off_leaves_nothing_on(kind, where, monkeypatch):
    model, x, error = rest(nn.Sequential(network(), Breaks())), batch(), kind("broken off")
    model(x)

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        if where == "between operations":
            model[1].error = error
        elif where == "in an operation":
            patch.setattr("backsketch.rest.pointwise.write_slopes", fail)
        else:
            patch.setattr("backsketch.rest.saving.PackedMemory.of", fail)
        with pytest.raises(kind):
            model(x)
        assert_nothing_is_on()
    model[1].error = None
    loss_of(model(x)).backward()


def test_two_threads_train_two_models_at_once():
    def train(results, name):
        model = rest(copy.deepcopy(models[name]), EIGHT)
        for _ in range(10):
            model.zero_grad()
            loss_of(model(inputs[name])).backward()
            started.wait()
        results[name] = flat(model)

    models, inputs = [network(), network()], [batch(), batch(seed=5)]
    exact = [gradient(model, x) for model, x in zip(models, inputs, strict=True)]
    started = threading.Barrier(2)
    results: dict[int, Tensor] = {}
    threads = [threading.Thread(target=train, args=(results, name)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(is_close(results[name], exact[name]) for name in range(2))


# Resuming and copies


def train(model, steps, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(batch()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_resumed_run_is_the_same_bit_for_bit():
    model = rest(network(dropout=0.2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    train(model, 3, optimizer)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    expected = train(model, 4, optimizer)
    again = rest(network(dropout=0.2))
    optimizer = torch.optim.SGD(again.parameters(), lr=1e-3, momentum=0.9)
    again.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    torch.set_rng_state(state[2])
    assert train(again, 4, optimizer) == expected
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_between_forward_and_backward_trains_alike(duplicate):
    model = rest(network(dropout=0.2))
    train(model, 2)
    loss = loss_of(model(batch()))
    twin = duplicate(model)
    loss.backward()
    model.zero_grad()
    twin.zero_grad()
    torch.manual_seed(3)
    expected = train(model, 3)
    torch.manual_seed(3)
    assert train(twin, 3) == expected


def test_the_outermost_of_nested_models_decides():
    inner, x = rest(network(), FEW), batch()
    outer = nn.Sequential(inner, nn.Linear(WIDTH, WIDTH))
    assert packed_during(lambda: outer(x))[0] == packed_during(lambda: inner(x))[0] > 0
    rest(outer, RestConfig(min_elements=10**9))
    rest(inner, FEW)
    assert packed_during(lambda: outer(x))[0] == 0
    assert packed_during(lambda: inner(x))[0] > 0


def test_without_gradients_nothing_is_saved():
    model, x = rest(network()), batch()
    state = torch.get_rng_state()
    with torch.no_grad():
        assert packed_during(lambda: model(x)) == (0, 0)
    with torch.inference_mode():
        assert packed_during(lambda: model(x)) == (0, 0)
    model.eval()
    assert packed_during(lambda: model(x)) == (0, 0)
    assert torch.equal(torch.get_rng_state(), state)
    model.train()
    with torch.inference_mode():
        made = x * 1
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        nn.Linear(WIDTH, WIDTH)(made)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        model(made)


# Tensors of all kinds


class InPlace(nn.Module):
    """Changes activations in place after they were saved, or copies of them."""

    def __init__(self, copies):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.copies = copies

    def saved(self, x):
        return x.clone() if self.copies else x

    def forward(self, x):
        x = self.layers[0](x)
        hidden = F.relu_(self.layers[1](x))
        x = self.saved(x)
        x += self.saved(hidden)
        gate = self.layers[2](x)
        gate.sigmoid_()
        gate = self.saved(gate)
        gate *= 2
        y = self.layers[3](x * gate)
        torch.tanh_(y)
        y = self.saved(y)
        y.clamp_(-0.5, 0.9)
        y = self.saved(y)
        y[:, ::2] *= 3
        z = F.silu(self.saved(F.elu_(x - y)), inplace=True)
        return z.add_(F.leaky_relu(self.saved(y), 0.1, inplace=True))


def test_operations_in_place():
    """Each saves what was there when it ran; torch itself refuses to change most of that later."""
    exact, model, x = InPlace(copies=True), InPlace(copies=False), batch()
    model.load_state_dict(exact.state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(model, x)
    assert is_close(gradient(rest(model, EIGHT), x), gradient(exact, x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(50, WIDTH), Block()
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))


def test_tied_weights_and_integers():
    model, tokens = Tied(), torch.randint(0, 50, (4, 16))
    exact = gradient(model, tokens)
    rest(model, EIGHT)
    assert is_close(gradient(model, tokens), exact)
    assert model.head.weight is model.embedding.weight


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv, self.group = nn.Conv2d(16, 16, 3, padding=1, groups=2), nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x)), inplace=True), 2)
        y = F.hardswish(self.group(self.conv(x)))
        y += x
        x = F.avg_pool2d(F.leaky_relu(y, 0.1), 2)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_in_every_layout(layout):
    model, x = Convolutions(), batch(4, 3, 16, 16).to(memory_format=layout)
    model.to(memory_format=layout)  # type: ignore[call-overload]
    exact = gradient(model, x)
    plain = saved_bytes(model, x)
    rest(model, EIGHT)
    assert is_close(gradient(model, x), exact)
    assert saved_bytes(model, x) < 0.5 * plain


def saved_bytes(model, x):
    with saved_memory(model) as saved:
        out = model(x)
    del out
    return saved.most_activations


def test_max_pooling_without_a_batch_finds_its_places():
    """Of which there are more than an integer of 16 bits can count."""
    x = batch(2, 200, 300).requires_grad_()
    (exact,) = torch.autograd.grad(loss_of(F.max_pool2d(x * 1.0, 2)), x)
    with packing(FEW):
        out = F.max_pool2d(x * 1.0, 2)
    assert torch.equal(torch.autograd.grad(loss_of(out), x)[0], exact)


def test_sparse_and_nested_tensors_stay_as_they_are():
    dense = batch(16, 16).relu()

    def step(config):
        values, x = dense.clone().requires_grad_(), batch(16, WIDTH).requires_grad_()
        with nullcontext() if config is None else packing(config):
            hidden = x * 1.0
            out = torch.mm((values * 1.0).to_sparse(), hidden * hidden) * hidden
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss_of(out), [values, x])])

    assert is_close(step(EIGHT), step(None))
    with packing(EIGHT), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = torch.nested.nested_tensor([batch(5, WIDTH), batch(7, WIDTH)], requires_grad=True)
        out = F.gelu(rows * 1.0) * rows
    out.to_padded_tensor(0.0).sum().backward()
    (exact,) = torch.autograd.grad((F.gelu(x := batch(5, WIDTH).requires_grad_()) * x).sum(), x)
    torch.testing.assert_close(rows.grad.unbind()[0], exact)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        spectrum = torch.fft.rfft(self.layer(x))
        return torch.fft.irfft(spectrum * spectrum.conj() * spectrum.imag, n=WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_complex_numbers_and_wide_ones(dtype):
    for model in (Complex(), network()):
        model, x = model.to(dtype), batch().to(dtype)
        exact = gradient(model, x)
        found = gradient(rest(model, EIGHT), x)
        assert is_close(found, exact)
        assert found.dtype == dtype


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    model, x = network(), batch(rows, WIDTH)
    exact = gradient(model, x)
    found = gradient(rest(model, EIGHT), x)
    assert is_close(found, exact) if rows else torch.equal(found, exact)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(value):
    """A scaler of gradients finds overflow by it."""
    model, x = network(), batch()
    x[3, 5] = value
    for config in (FEW, EIGHT):
        assert not gradient(rest(model, config), x).isfinite().all()


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, F.softplus, F.elu])
def test_functions_of_infinity_have_their_slope(function):
    x = batch().masked_fill(batch(seed=3) > 1, -math.inf).requires_grad_()
    with packing(FEW):
        out = function(x * 1.0)
    (found,) = torch.autograd.grad(out.sum(), x)
    step = 1.2 / (2**3 - 1)
    assert (found[x.isinf()]).abs().max() <= step
    assert abs(found[x.isinf()].mean()) < step / 4


def test_hooks_that_change_the_gradient():
    def run(model, x):
        handles = [
            model[1].register_full_backward_hook(lambda module, grads, out: (2 * grads[0],)),
            model[3].register_forward_hook(lambda module, inputs, out: out * 0.5),
            model[2].register_full_backward_pre_hook(lambda module, out: (out[0] * 3,)),
        ]

        def hooked(x):
            hidden = model[0](x)
            hidden.register_hook(lambda grad: grad * batch(seed=4))
            return model[1:](hidden)

        found = gradient(model, x, run=hooked)
        for handle in handles:
            handle.remove()
        return found

    model, x = network(), batch()
    exact = run(model, x)
    assert is_close(run(rest(model, EIGHT), x), exact)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_padded_tokens_get_no_gradient(attention, dropout):
    """A single masked probability among 128 is zero in backward too; else a warning would say that rows are missing."""
    model, inputs = roberta(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    model.set_attn_implementation(attention)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, -1:] = mask[1, 20:] = 0
    found: list[Tensor] = []
    for name, layer in model.named_modules():
        if name.endswith(("key", "value", "intermediate.dense")):
            layer.register_forward_hook(lambda module, args, out: out.register_hook(found.append) and None)
    sketch_(model.train(), rest=RestConfig(min_elements=64))(**inputs, attention_mask=mask).loss.backward()
    assert len(found) == 6
    assert not any(gradient[mask == 0].any() for gradient in found)


def test_a_mask_that_many_operations_save_is_kept_once():
    mask = batch(64, 64) > 0

    def kept(times, packed, used):
        x = batch(64, 64).requires_grad_()
        with saved_memory() as saved, packing(FEW) if packed else nullcontext():
            for _ in range(times):
                x = x.masked_fill(used, 0.0)
        return saved.activations, torch.autograd.grad(x.sum(), x)

    assert kept(1, True, mask)[0] == kept(12, True, mask)[0] == mask.numel() // 8
    row = mask[:1].clone().expand(64, 64)
    assert kept(2, True, row)[0] == kept(2, False, row)[0]


# Memory


def test_nothing_packed_outlives_its_graph():
    model, x = rest(network(dropout=0.2)), batch()
    alive: list[weakref.ref[Tensor]] = []

    def observer(family, tensor, kept):
        if kept is not None:
            alive.extend(weakref.ref(each) for each in getattr(kept, "tensors", (kept,)))

    gc.collect()
    gc.disable()  # nothing may wait for it
    try:
        for end in ("backward", "never"):
            with observe_saving(observer):
                loss = loss_of(model(x))
            assert sum(each() is not None for each in alive) > 5
            if end == "backward":
                loss.backward()
                assert all(each() is None for each in alive)
            del loss
            assert all(each() is None for each in alive)
    finally:
        gc.enable()
    assert not packed_copies._memo.copies
    assert not sharing._memo.entries


def test_memory_is_bounded_over_many_steps():
    model, x = rest(network(dropout=0.2)), batch(seed=1)

    def count():
        gc.collect()
        return len(gc.get_objects())

    train(model, 20)
    before = count()
    train(model, 200)
    assert count() <= before + 50
    del x

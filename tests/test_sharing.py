"""One sketch per input: who shares, who does not, and for how long."""

import gc
import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from backsketch import SketchConfig, sketch_, sketched_linear, valid_rows
from backsketch.linear.sharing import _memo
from cases import saved_storages, within_five_standard_errors

CONFIG = SketchConfig(ratio=0.5)
ROWS, FEATURES = 20, 6


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    gc.collect()
    assert not _memo.entries


@pytest.fixture
def x():
    return torch.randn(ROWS, FEATURES)


def weights(count):
    return [torch.randn(5, FEATURES, requires_grad=True) for _ in range(count)]


def activations(run, parameters):
    """Return the bytes of each storage held beside the parameters, largest first."""
    held = saved_storages(run)
    for parameter in parameters:
        held.pop(parameter.untyped_storage().data_ptr(), None)
    return sorted(held.values(), reverse=True)


def test_layers_that_read_one_tensor_keep_one_sketch_and_one_seed(x):
    parameters = weights(3)
    held = activations(lambda: [sketched_linear(x, weight, None, CONFIG) for weight in parameters], parameters)
    assert held == [10 * FEATURES * 4, 8]


@pytest.mark.parametrize("config", [CONFIG, SketchConfig(kind="hash", ratio=0.5, bits=4, center=True)], ids=str)
def test_shared_gradients_are_those_of_one_sketch_over_both_layers(x, config):
    """With one S, the gradients of stacked weights are the stacked gradients."""
    first, second = weights(2)
    both = torch.cat((first, second)).detach().requires_grad_()
    torch.manual_seed(4)
    a, b = sketched_linear(x, first, None, config), sketched_linear(x, second, None, config)
    torch.manual_seed(4)
    c = sketched_linear(x.clone(), both, None, config)
    y = torch.randn(ROWS, 10)
    c.backward(y)
    (a * y[:, :5]).sum().backward()
    (b * y[:, 5:]).sum().backward()
    torch.testing.assert_close(torch.cat((first.grad, second.grad)), both.grad)


def test_a_view_of_the_same_memory_shares_and_another_shape_does_not(x):
    parameters = weights(2)
    other = weights(1)[0]
    assert (
        len(activations(lambda: [sketched_linear(x.view(ROWS, -1), w, None, CONFIG) for w in parameters], parameters))
        == 2
    )
    run = lambda: [sketched_linear(x, other, None, CONFIG), sketched_linear(x.view(4, 5, -1), other, None, CONFIG)]  # noqa: E731
    assert len(activations(run, [other])) == 4


def test_another_config_or_dtype_does_not_share(x):
    first, second, third = weights(3)
    other = SketchConfig(ratio=0.25)
    run = lambda: [sketched_linear(x, w, None, c) for w, c in ((first, CONFIG), (second, other))]  # noqa: E731
    assert activations(run, [first, second]) == [10 * FEATURES * 4, 5 * FEATURES * 4, 8, 8]

    def mixed():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = sketched_linear(x, first, None, CONFIG), sketched_linear(x, second, None, CONFIG)
        return half, sketched_linear(x, third, None, CONFIG)

    assert activations(mixed, [first, second, third]) == [10 * FEATURES * 4, 10 * FEATURES * 2, 8, 8]


@pytest.mark.parametrize("fill", ["numpy", "data", "another layer"])
def test_a_buffer_that_is_filled_again_behind_pytorch_is_kept_anew(fill):
    """A backward that is left out keeps the first sketch alive; the next step reads other values in the same memory."""
    buffer, target = torch.zeros(ROWS, FEATURES), torch.randn(ROWS, 5)
    layers = nn.ModuleList(nn.Linear(FEATURES, 5, bias=False) for _ in range(2))
    sketch_(layers, CONFIG)
    left_out, samples = [], []
    batches = torch.randn(2, ROWS, FEATURES)
    expected = target.t() @ batches[1]
    for _ in range(300):
        layers.zero_grad()
        buffer.numpy()[:] = batches[0].numpy()
        left_out.append(layers[0](buffer))
        if fill == "data":
            buffer.data.copy_(batches[1])
        else:
            buffer.numpy()[:] = batches[1].numpy()
        second: Any = layers[1] if fill == "another layer" else layers[0]
        second(buffer).backward(target)
        samples.append((second.weight.grad * expected).sum() / expected.square().sum())
        left_out.clear()
    assert within_five_standard_errors(torch.stack(samples), 1)


@pytest.mark.parametrize("view", [False, True])
def test_a_buffer_with_a_constant_border_is_kept_anew_too(view):
    """Pictures have black borders: no place in a row may be the only one that is looked at."""
    buffer = torch.zeros(128, 64).requires_grad_(view)
    batches, target = torch.rand(2, 128, 64), torch.randn(128, 5)
    batches[:, :, :8] = 0
    layers = [sketch_(nn.Linear(64, 5, bias=False), CONFIG) for _ in range(2)]
    left_out = []
    for batch, layer in zip(batches, layers, strict=True):
        buffer.detach().numpy()[:] = batch.numpy()
        left_out.append(layer(buffer.view(4, 32, 64).flatten(0, 1) if view else buffer))
    left_out[1].backward(target)
    old, new = (target.t() @ batch for batch in batches - batches.mean((0, 1)))
    assert layers[1].weight.grad is not None
    gradient = layers[1].weight.grad - target.sum(0).unsqueeze(1) * batches.mean((0, 1))
    closer = [torch.cosine_similarity(gradient.flatten(), each.flatten(), dim=0) for each in (new, old)]
    assert closer[0] > 0.2 > closer[1]


@pytest.mark.parametrize("layout", ["rows", "columns", "values", "odd"])
def test_a_buffer_in_which_two_parts_change_places_is_kept_anew(layout):
    """A shuffled buffer has the values that it had, and most of them where they were."""
    whole = torch.randn(1024, 64)
    buffer = whole[:, 1:].to(torch.bfloat16) if layout == "odd" else whole
    parts = buffer.T if layout == "columns" else buffer.view(-1) if layout == "values" else buffer
    memory = parts.view(torch.int16).numpy() if layout == "odd" else parts.numpy()
    parameters = [torch.randn(5, buffer.shape[1], dtype=buffer.dtype, requires_grad=True) for _ in range(2)]

    def run(swapped):
        first = sketched_linear(buffer, parameters[0], None, CONFIG)
        if swapped:
            memory[[20, 42]] = memory[[42, 20]]
        return first, sketched_linear(buffer, parameters[1], None, CONFIG)

    sketches = [len(activations(partial(run, swapped), parameters)) / 2 for swapped in (False, True)]
    assert sketches == [1, 2]


@pytest.mark.parametrize("change", ["signs", "places of one value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_buffer_whose_changed_bits_are_all_high_ones_is_kept_anew(dtype, change):
    """A sign is the highest bit, and 2.0 is a single one: little is left of them in a product with an odd number."""
    buffer = torch.randn(1024, 64, dtype=dtype) if change == "signs" else torch.zeros(1024, 64, dtype=dtype)
    parameters = [torch.randn(5, 64, dtype=dtype, requires_grad=True) for _ in range(2)]
    memory = buffer.numpy()

    def run(place):
        memory[3, 1] = 2.0
        first = sketched_linear(buffer, parameters[0], None, CONFIG)
        if place is not None and change == "signs":
            memory[:, 1::2] *= -1
        elif place is not None:
            memory[3, 1], memory[place] = 0.0, 2.0
        return first, sketched_linear(buffer, parameters[1], None, CONFIG)

    places = [None] + [(row, 7) for row in range(10, 18)]
    sketches = [len(activations(partial(run, place), parameters)) / 2 for place in places]
    assert sketches == [1] + [2] * 8


def test_a_layer_called_again_shares_with_no_call_of_its_own(x):
    layer = sketch_(nn.Linear(FEATURES, 5, bias=False), CONFIG)
    assert activations(lambda: [layer(x), layer(x)], [layer.weight]) == [10 * FEATURES * 4] * 2 + [8] * 2


def test_a_change_in_place_between_two_layers_is_seen(x):
    first, second = weights(2)
    config = SketchConfig(ratio=0.5)
    a = sketched_linear(x, first, None, config)
    before = x.clone()
    x.add_(100)
    b = sketched_linear(x, second, None, config)
    (a.sum() + b.sum()).backward()
    assert first.grad.abs().max() <= 2 * before.abs().sum()
    assert second.grad.mean() == pytest.approx(100 * ROWS, rel=0.05)


def test_the_next_step_on_the_same_tensor_has_a_new_sketch(x):
    (weight,) = weights(1)
    grads = []
    for _ in range(3):
        out = sketched_linear(x, weight, None, CONFIG)
        weight.grad = None
        out.sum().backward()
        grads.append(weight.grad)
    assert not torch.equal(grads[0], grads[1])
    assert not torch.equal(grads[1], grads[2])


def test_nothing_is_held_once_autograd_lets_go(x):
    parameters = weights(3)
    outs = [sketched_linear(x, weight, None, CONFIG) for weight in parameters]
    assert len(_memo.entries) == 1
    sum(out.sum() for out in outs).backward()
    assert not _memo.entries  # backward frees what was saved, though the outputs still live


def test_memory_used_again_is_not_mistaken_for_the_old_input():
    (weight,) = weights(1)
    outs = []
    for value in range(50):  # each input dies at once and its memory is likely used again for the next
        outs.append(sketched_linear(torch.full((ROWS, FEATURES), float(value)), weight, None, CONFIG))
    for value, out in enumerate(outs):
        (grad,) = torch.autograd.grad(out.sum(), weight)
        torch.testing.assert_close(grad, torch.full_like(grad, value * ROWS))


def test_threads_do_not_share(x):
    parameters = weights(2)
    outs = [sketched_linear(x, parameters[0], None, CONFIG)]
    thread = threading.Thread(target=lambda: outs.append(sketched_linear(x, parameters[1], None, CONFIG)))
    thread.start()
    thread.join()
    kept = [out.grad_fn.saved_tensors[-1].data_ptr() for out in outs]
    assert kept[0] != kept[1]


class Attention(nn.Module):
    """q, k and v read one tensor, dropout draws random numbers in between."""

    def __init__(self, config):
        super().__init__()
        self.weights = nn.ParameterList(weights(3))
        self.config = config

    def forward(self, x):
        q, k, v = (nn.functional.dropout(sketched_linear(x, w, None, self.config), 0.5) for w in self.weights)
        return q * k + v


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
def test_checkpointing_recomputes_the_same_gradient(x, reentrant, preserve):
    """Sharing depends on what is alive, and that differs when recomputing; the random numbers drawn must not."""
    layer = Attention(CONFIG)
    grads = []
    for use in (False, True):
        layer.zero_grad()
        torch.manual_seed(9)
        source = x.clone().requires_grad_()
        out = checkpoint(layer, source, use_reentrant=reentrant, preserve_rng_state=preserve) if use else layer(source)
        out.square().sum().backward()
        grads.append([source.grad, *(weight.grad for weight in layer.weights)])
    if preserve:  # the input's gradient sees every dropout mask, the weights' every sketch
        assert torch.equal(grads[0][0], grads[1][0])
        assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True)) or not reentrant
    assert all(grad.isfinite().all() and grad.any() for grad in grads[1])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("config", [CONFIG, SketchConfig(kind="hash", ratio=0.5, bits=4, center=True)], ids=str)
def test_selective_checkpointing_meets_the_operations_of_forward_again(x, config, masked):
    """It keeps what each operation with a plain result gave, and counts them: recomputing must not ask for more."""
    layer = Attention(config)
    save_products = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    grads = []
    for use in (False, True):
        layer.zero_grad()
        torch.manual_seed(9)
        source = x.clone().requires_grad_()
        with valid_rows(torch.arange(ROWS) < 12) if masked else nullcontext():
            out = checkpoint(layer, source, use_reentrant=False, context_fn=save_products) if use else layer(source)
        (out[:12] if masked else out).square().sum().backward()
        grads.append([source.grad, *(weight.grad for weight in layer.weights)])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_without_saved_random_state_is_still_unbiased(x, reentrant):
    (weight,) = weights(1)
    samples = []
    y = torch.randn(ROWS, 5)
    for _ in range(300):
        source = x.clone().requires_grad_()
        layer = lambda a: sketched_linear(a, weight, None, CONFIG)  # noqa: E731
        checkpoint(layer, source, use_reentrant=reentrant, preserve_rng_state=False).backward(y)
        samples.append(weight.grad)
        weight.grad = None
    assert within_five_standard_errors(torch.stack(samples), (y.t() @ x).double(), 1e-5)


def test_reentrant_checkpointing_of_a_computed_weight_draws_the_same_random_numbers(x):
    """Under no_grad a normalised weight does not seem to be trained; dropout after it must not shift all the same."""
    layer: Any = nn.Sequential(nn.Linear(FEATURES, 5), nn.Dropout(0.5)).train()
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(layer[0])
    sketch_(layer, CONFIG)
    grads = []
    for use in (False, True):
        layer.zero_grad()
        torch.manual_seed(3)
        source = x.clone().requires_grad_()
        (checkpoint(layer, source, use_reentrant=True) if use else layer(source)).square().sum().backward()
        grads.append(layer[0].bias.grad)
    assert torch.equal(*grads)


def test_inference_tensors_are_not_shared():
    (weight,) = weights(1)
    with torch.inference_mode():
        x = torch.ones(ROWS, FEATURES)
    first = sketched_linear(x, weight, None, CONFIG)
    with torch.inference_mode():
        x.add_(100)
    (grad,) = torch.autograd.grad(sketched_linear(x, weight, None, CONFIG).sum(), weight)
    assert first.grad_fn is not None
    torch.testing.assert_close(grad, torch.full_like(grad, 101.0 * ROWS))


def test_a_negated_view_of_the_same_memory_does_not_share():
    """The imaginary part of a conjugate is the same memory read with its sign flipped."""
    (weight,) = weights(1)
    source = torch.randn(ROWS, FEATURES, dtype=torch.complex64)
    first, second = source.imag, source.conj().imag
    assert second.is_neg()
    outs = [sketched_linear(x, weight, None, SketchConfig(dim=ROWS - 1)) for x in (first, second)]
    grads = [torch.autograd.grad(out.sum(), weight)[0] for out in outs]
    exact = first.sum(0).expand_as(weight)
    assert (grads[0] * exact).sum() > 0
    assert (grads[1] * exact).sum() < 0

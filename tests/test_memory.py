"""What is held for backward and what the peak is, to the byte."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backsketch import SketchConfig, peak_memory, saved_memory, sketch_
from backsketch.memory.live_storages import ROLES

FLOAT = 4


def mlp(features=8, middle=16):
    return nn.Sequential(nn.Linear(features, middle), nn.GELU(), nn.Linear(middle, features))


def train_step(model, x, optimizer=None):
    model(x).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


# saved_memory


def test_counts_activations_and_parameters_apart():
    model, x = mlp(), torch.randn(5, 8)
    with saved_memory(model) as saved:
        out = model(x)
    # The first layer keeps x, GELU its input, the second layer GELU's output, and its weight for ∂x.
    assert saved.activations == FLOAT * (5 * 8 + 5 * 16 + 5 * 16)
    assert saved.parameters == FLOAT * 16 * 8
    assert saved.total == saved.activations + saved.parameters
    with saved_memory() as nameless:
        other = model(x)
    assert (nameless.parameters, nameless.total) == (0, saved.total)
    del out, other


def test_counts_a_storage_once_however_many_hold_it():
    x, layers = torch.randn(5, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    with saved_memory(layers) as saved:
        out = sum(layer(part) for layer, part in zip(layers, (x, x, x[:, :]), strict=True))
    assert saved.activations == FLOAT * 5 * 8
    del out


def test_counts_the_whole_storage_behind_a_view():
    x, layer = torch.randn(5, 7, 8), nn.Linear(8, 2)
    with saved_memory(layer) as saved:
        out = layer(x[:, 0])
    assert saved.activations == FLOAT * 5 * 7 * 8
    del out


def test_sees_what_custom_functions_save():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.new_ones(3), x)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x = torch.randn(10, requires_grad=True)
    with saved_memory() as saved:
        out = Double.apply(x)
    assert saved.total == FLOAT * 13
    del out
    assert saved.total == 0


@pytest.mark.parametrize("free", ["backward", "drop"])
def test_falls_to_zero_when_the_graph_is_gone(free):
    model, x = mlp(), torch.randn(5, 8)
    gc.disable()
    try:
        with saved_memory(model) as saved:
            loss = model(x).exp().softmax(-1).sum()  # both keep their own output: a cycle if held carelessly
        assert saved.activations > 0
        if free == "backward":
            loss.backward()
        else:
            del loss
        assert saved.total == 0
    finally:
        gc.enable()


def test_does_not_change_gradients_even_second_ones():
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def second():
        (grad,) = torch.autograd.grad(x.exp().tanh().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    expected = second()
    with saved_memory():
        assert torch.equal(second(), expected)


@pytest.mark.parametrize("watch", [saved_memory, peak_memory])
def test_what_was_changed_in_place_is_an_error_as_without_watching(watch):
    x = torch.randn(3, requires_grad=True)
    with watch(nn.Linear(3, 3)):
        y = x.exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_checkpoint_holds_its_input_alone():
    model, x = mlp(), torch.randn(5, 8, requires_grad=True)
    with saved_memory(model) as saved:
        out = checkpoint(model, x, use_reentrant=False)
    assert saved.activations == FLOAT * 5 * 8
    out.sum().backward()


def test_a_sketched_layer_holds_its_rows_and_a_seed():
    layer = sketch_(nn.Linear(8, 4), SketchConfig(ratio=0.25))
    with saved_memory(layer) as saved:
        out = layer(torch.randn(40, 8))
    assert saved.activations == FLOAT * 10 * 8 + 8
    del out


# peak_memory


def test_peak_of_plain_tensors_to_the_byte():
    a = torch.randn(100)
    with peak_memory() as peak:
        b = a + 1  # a, b
        c = b * 2  # a, b, c
        del b
        d = c[:50] + 1  # a, c, d and no more
        assert peak.live == FLOAT * (100 + 100 + 50)
        del c, d
        assert peak.live == FLOAT * 100
    assert peak.total == FLOAT * 300
    assert str(peak.place) == "forward, outside the model (aten.mul.Tensor)"


def test_peak_counts_views_and_in_place_work_as_nothing():
    a = torch.randn(10, 10)
    with peak_memory() as peak:
        a.t().view(-1).add_(1) if a.t().is_contiguous() else a.view(-1).add_(1)
    assert peak.total == FLOAT * 100


def test_a_resized_storage_counts_at_its_new_size():
    a = torch.randn(10)
    with peak_memory() as peak:
        a.resize_(30)
        assert peak.live == FLOAT * 30


def test_a_second_block_starts_afresh():
    a = torch.randn(100)
    peak = peak_memory()
    for _ in range(2):
        with peak:
            b = a + 1
        assert peak.total == FLOAT * 200
        del b


def test_parts_of_the_peak():
    model, x = mlp(64, 64), torch.randn(4, 64)
    parameters = sum(p.numel() for p in model.parameters()) * FLOAT
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    train_step(model, x, optimizer)
    with peak_memory(model, optimizer) as peak:
        train_step(model, x, optimizer)
    assert tuple(peak.parts) == ROLES
    assert sum(peak.parts.values()) == peak.total
    assert peak.place.phase == "optimizer"  # few rows, many weights
    assert peak.parts["parameters"] == peak.parts["gradients"] == parameters
    assert peak.parts["optimizer_states"] == 2 * parameters + FLOAT * len(list(model.parameters()))
    assert peak.cuda is None or torch.cuda.is_available()


def test_states_are_known_as_such_from_the_first_step():
    model, x = mlp(64, 64), torch.randn(4, 64)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with peak_memory(model) as peak:
        train_step(model, x, optimizer)
    assert peak.parts["optimizer_states"] >= 2 * FLOAT * sum(p.numel() for p in model.parameters()) - 2 * FLOAT * 64


def test_peak_in_backward_holds_what_autograd_saved():
    model, x = mlp(), torch.randn(1000, 8)
    with saved_memory(model) as saved:
        loss = model(x).sum()
    held = saved.activations
    peaks = []
    for _ in range(2):
        model.zero_grad()
        with peak_memory(model) as peak:
            model(x).sum().backward()
        peaks.append((peak.total, peak.parts, str(peak.place)))
    assert peaks[0] == peaks[1]
    assert (peak.place.phase, peak.place.module) == ("backward", "2")
    assert peak.parts["activations"] == held + 2 * FLOAT  # the loss and its gradient, 1
    del loss


def test_peak_agrees_with_the_tracker_that_torch_ships():
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker").MemTracker()
    model, x = mlp(), torch.randn(500, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, x, optimizer)
    tracker.track_external(model, optimizer, x)
    with tracker:
        train_step(model, x, optimizer)
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    with peak_memory(model, optimizer) as peak:
        train_step(model, x, optimizer)
    assert peak.total == theirs


def test_what_a_checkpoint_keeps_is_an_activation():
    model, x = nn.Sequential(mlp(), mlp()), torch.randn(1000, 8)
    with peak_memory(model) as peak:
        hidden = model[0](x)
        checkpoint(lambda value: model[1](value), hidden * 2, use_reentrant=False).sum().backward()
    assert peak.place.phase == "backward"
    assert peak.parts["activations"] >= FLOAT * 1000 * (8 + 16 + 16 + 8)


def test_watching_changes_nothing():
    model, x = mlp(), torch.randn(6, 8)
    train_step(model, x)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with peak_memory(model):
        train_step(model, x)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("ratio", [None, 0.5, 0.1])
def test_peak_is_a_straight_line_in_the_batch(ratio):
    model = mlp(32, 64)
    if ratio is not None:
        sketch_(model, SketchConfig(ratio=ratio))
    train_step(model, torch.randn(4500, 32))  # loads what is compiled, which takes memory once
    peaks = []
    for rows in (4500, 5500, 6500, 7500):  # one table of positions serves all of these
        model.zero_grad()
        with peak_memory(model) as peak:
            train_step(model, torch.randn(rows, 32))
        peaks.append(peak.total)
    steps = torch.tensor(peaks).diff()
    assert steps.min() > 0
    assert steps.max() - steps.min() <= 0.001 * steps.max()


def test_two_thousand_steps_leave_nothing_behind():
    model = sketch_(nn.Linear(8, 8), SketchConfig(ratio=0.25))
    x = torch.randn(16, 8)
    with peak_memory(model) as peak:
        train_step(model, x)
        live = peak.live
        for _ in range(1999):
            train_step(model, x)
        assert peak.live == live

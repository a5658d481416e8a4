"""The meter of saved tensors: it sees what other hooks keep, inside and outside of it, and changes nothing."""

import gc
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from backsketch import peak_memory, saved_memory
from backsketch.tensor_storages import tensors_within
from backsketch.torch_private import innermost_hooks, saves_for_checkpoint
from cases import needs_shown_saves

FLOAT = 4
ROWS, FEATURES, MIDDLE = 50, 8, 16
EXACT = FLOAT * ROWS * (FEATURES + MIDDLE + MIDDLE)  # the input, what GELU reads, what it returns
WEIGHT = FLOAT * FEATURES * MIDDLE  # of the second layer, for the gradient of what it reads
COMPRESSED = (EXACT + WEIGHT) // FLOAT + 4 * FLOAT  # a byte for each value and a scale for each of four tensors
ENTER, EXIT = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, MIDDLE), nn.GELU(), nn.Linear(MIDDLE, FEATURES))


def batch():
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1))


@dataclass
class Codes:
    values: torch.Tensor
    scale: torch.Tensor


class Parcel:
    """An object like any other, of the kind that hooks return."""

    __slots__ = ("__dict__", "inside", "owner")

    def __init__(self, inside, owner=None):
        self.inside, self.owner = inside, owner


class Pair(NamedTuple):
    first: Any
    second: Any


def encode(x):
    scale = x.abs().amax().clamp(min=1e-6) / 127
    return (x / scale).round().to(torch.int8), scale


def decode(values, scale):
    return values.to(torch.float32) * scale


def compressing():
    return saved_tensors_hooks(encode, lambda kept: decode(*kept))


def compressing_to_objects():
    return saved_tensors_hooks(lambda x: Parcel(Codes(*encode(x))), lambda kept: decode(**vars(kept.inside)))


def copying():
    return saved_tensors_hooks(torch.clone, lambda kept: kept)


@contextmanager
def nothing():
    yield


WAYS = [nothing, compressing, compressing_to_objects, copying, save_on_cpu]


def gradients(model, loss):
    return [*torch.autograd.grad(loss, list(model.parameters()))]


def expected_gradients(*ways):
    """Return what training gives under these hooks, without a meter."""
    model = mlp()
    with ExitStack() as stack:
        for way in ways:
            stack.enter_context(way())
        loss = model(batch()).square().mean()
    return gradients(model, loss)


def same(found, expected):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


# What hooks inside keep


@pytest.mark.parametrize("way", [compressing, compressing_to_objects])
def test_what_compressing_hooks_keep_is_counted_to_the_byte(way):
    model, x = mlp(), batch()
    with saved_memory(model) as saved, way():
        out = model(x)
    assert (saved.activations, saved.parameters) == (COMPRESSED, 0)
    assert saved.most_activations == COMPRESSED
    del out
    assert (saved.total, saved.most_activations) == (0, COMPRESSED)


def test_hooks_count_only_where_they_run():
    model, x = mlp(), batch()
    with saved_memory(model) as saved:
        hidden = model[1](model[0](x))
        with compressing():
            out = model[2](hidden)
        again = model[0](x)
    plain = FLOAT * ROWS * (FEATURES + MIDDLE)
    assert saved.activations == plain + ROWS * MIDDLE + FEATURES * MIDDLE + 2 * FLOAT
    del out, again


def test_a_copy_counts_beside_the_tensor_it_is_of():
    x = torch.randn(10, requires_grad=True)
    with saved_memory() as saved:
        first = x.square()
        with copying():
            second = x.square()
    assert saved.total == 2 * FLOAT * 10
    del first, second


def test_what_is_offloaded_inside_counts_where_it_is():
    x = torch.randn(10, requires_grad=True)
    with saved_memory() as saved:
        with saved_tensors_hooks(lambda x: x.to("meta"), torch.ones_like):
            out = x.square()
        other = x.square()
    assert saved.by_device == {"meta": FLOAT * 10, "cpu": FLOAT * 10}
    assert saved.activations == 2 * FLOAT * 10
    del out, other
    assert saved.by_device == {}
    model = mlp()
    with saved_memory(model) as saved, save_on_cpu():
        loss = model(batch()).sum()
    assert saved.activations == EXACT  # it is on the CPU already
    loss.backward()
    assert saved.total == 0


def test_a_checkpoint_inside_keeps_its_input_and_what_it_runs_again():
    model, x = mlp(), batch().requires_grad_()
    with saved_memory(model) as saved:
        out = checkpoint(model, x, use_reentrant=False)
        assert saved.activations == saved.most_activations == x.nbytes
        out.sum().backward()
        assert saved.activations == 0
    assert saved.most_activations == EXACT  # all activations of the region, run again in backward


def test_selective_checkpoints_run_as_ever():
    model, x = mlp(), batch()

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    with saved_memory(model):
        loss = checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().mean()
    assert same(gradients(model, loss), expected_gradients())


@needs_shown_saves
def test_layers_still_know_that_they_run_in_a_checkpoint():
    seen = []

    def region(x):
        seen.append(saves_for_checkpoint())
        with saved_memory():
            seen.append(saves_for_checkpoint())
            return x.exp()

    x = torch.randn(3, requires_grad=True)
    with saved_memory():
        checkpoint(region, x, use_reentrant=False).sum().backward()
        assert not saves_for_checkpoint()
    assert seen == [True] * 4
    assert x.grad is not None
    assert torch.equal(x.grad, x.exp())


# Hooks outside


@needs_shown_saves
@pytest.mark.parametrize(
    ("way", "size"), [(compressing, COMPRESSED), (compressing_to_objects, COMPRESSED), (save_on_cpu, EXACT)]
)
def test_hooks_outside_run_and_what_they_keep_is_counted(way, size):
    model = mlp()
    with way(), saved_memory(model) as saved:
        loss = model(batch()).square().mean()
    square = ROWS * FEATURES * FLOAT if way is save_on_cpu else ROWS * FEATURES + FLOAT
    assert saved.activations == size + square
    assert same(gradients(model, loss), expected_gradients(way))
    assert saved.total == 0


@needs_shown_saves
def test_only_the_innermost_of_the_hooks_outside_runs_as_without_a_meter():
    packed: list[Any] = []
    x = torch.randn(10, requires_grad=True)
    with saved_tensors_hooks(packed.append, lambda kept: kept), compressing(), saved_memory() as saved:
        out = x.square()
    assert saved.total == 10 + FLOAT
    assert packed == []
    del out


# Nested


@pytest.mark.parametrize("watch", [saved_memory, peak_memory])
@pytest.mark.parametrize("inside", WAYS)
@pytest.mark.parametrize("outside", [nothing, pytest.param(compressing, marks=needs_shown_saves), save_on_cpu])
def test_gradients_are_those_without_a_meter(watch, outside, inside):
    model = mlp()
    with outside(), watch(model), inside():
        loss = model(batch()).square().mean()
    assert same(gradients(model, loss), expected_gradients(outside, inside))


def test_the_innermost_of_nested_hooks_keeps_and_the_outer_ones_take_over_after_it():
    x = torch.randn(10, requires_grad=True)
    with saved_memory() as saved, copying():
        with compressing():
            inner = x.square()
        assert saved.total == 10 + FLOAT
        outer = x.square()
        assert saved.total == 10 + FLOAT + 10 * FLOAT
    del inner, outer
    assert saved.total == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_meter_inside_a_meter_sees_the_same(way):
    model, x = mlp(), batch()
    with saved_memory(model) as first:
        with way(), saved_memory(model) as second, saved_memory(model) as third:
            out = model(x)
        assert first.activations == second.activations == third.activations > 0
        assert len(first.notes) == len(second.notes) == len(third.notes) == 4
        other = model(x * 2)
    size = {compressing: COMPRESSED, compressing_to_objects: COMPRESSED, copying: EXACT + WEIGHT}.get(way, EXACT)
    assert second.activations == third.activations == size
    assert first.activations == size + EXACT
    del other
    assert first.activations == size
    del out
    assert first.total == second.total == third.total == 0


def test_a_peak_inside_a_meter_and_around_it():
    model, x = mlp(), batch()
    with peak_memory(model) as alone:
        model(x).sum().backward()
    model.zero_grad()
    with saved_memory(model) as around, peak_memory(model) as peak, saved_memory(model) as inside:
        model(x).sum().backward()
    assert around.most_activations == inside.most_activations == EXACT
    assert (peak.total, peak.parts, peak.place) == (alone.total, alone.parts, alone.place)


def test_the_peak_calls_what_hooks_keep_an_activation():
    x = torch.randn(1000, requires_grad=True)
    with peak_memory() as peak, compressing():
        out = x.square()
        assert peak.live >= FLOAT * 2000 + 1000 + FLOAT
        big = torch.zeros(2000)  # the peak, when only what is kept is left of packing
    assert peak.parts["activations"] == 1000 + FLOAT
    del out, big


# Nothing stays behind


def test_a_graph_under_hooks_and_meters_is_freed_without_the_collector():
    model, x = mlp(), batch()
    gc.disable()
    try:
        with saved_memory(model) as first, compressing(), saved_memory(model) as second:
            loss = model(x).exp().softmax(-1).sum()
        assert first.total == second.total > 0
        del loss
        assert first.total == second.total == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("watch", [saved_memory, peak_memory])
@pytest.mark.parametrize("way", [nothing, compressing])
def test_an_exception_inside_leaves_torch_as_it_was(watch, way):
    with pytest.raises(ZeroDivisionError), watch(), way(), watch(), way():
        raise ZeroDivisionError
    assert (saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__) == (ENTER, EXIT)
    assert innermost_hooks() is None
    with saved_memory() as saved:
        out = torch.randn(10, requires_grad=True).square()
    assert saved.total == 10 * FLOAT
    del out


def test_an_exception_of_a_hook_is_the_hooks_own():
    def fail(_):
        raise ZeroDivisionError

    x = torch.randn(10, requires_grad=True)
    with saved_memory() as saved:
        with pytest.raises(ZeroDivisionError), saved_tensors_hooks(fail, fail):
            x.square()
        with saved_tensors_hooks(lambda x: x.clone(), fail):
            out = x.square()
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        del out
        assert saved.total == 0
        out = x.square()
    assert saved.total == 10 * FLOAT
    assert saved_tensors_hooks.__enter__ is ENTER
    del out


def test_where_hooks_are_forbidden_the_meter_is_too_and_leaves_nothing():
    forbidden = torch.autograd.graph.disable_saved_tensors_hooks("not here")
    with forbidden, pytest.raises(RuntimeError, match="not here"), saved_memory():
        pass
    assert saved_tensors_hooks.__enter__ is ENTER


def test_hooks_of_another_thread_are_not_watched():
    x = torch.randn(10, requires_grad=True)
    kept = []

    def other():
        with compressing():
            kept.append(x.square())

    with saved_memory() as saved:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert saved.total == 0
    assert len(kept) == 1


# Tensors in what a hook returns


def test_tensors_are_found_in_containers_dataclasses_and_objects():
    a, b = torch.ones(1), torch.ones(2)
    for kept in (
        [a, {"b": (b, 3, None)}],
        Pair(a, [b]),
        Codes(a, b),
        Codes(a, Codes(b, None)),  # type: ignore[arg-type]
        Parcel([a, b]),
        Parcel(a, owner=Codes(b, None)),  # type: ignore[arg-type]
        (Parcel(a), Parcel(b)),
    ):
        assert [id(each) for each in tensors_within(kept)] == [id(a), id(b)]


def test_tensors_of_objects_that_an_object_refers_to_are_not_its_own():
    a, b = torch.ones(1), torch.ones(2)
    assert [id(each) for each in tensors_within(Parcel(a, owner=Parcel(b)))] == [id(a)]
    ring = Codes(a, None)  # type: ignore[arg-type]
    ring.scale = ring  # type: ignore[assignment]
    assert [id(each) for each in tensors_within(ring)] == [id(a)]
    for nothing_inside in (None, 3, "text", torch.float32, torch.device("cpu"), nullcontext(), Codes, len):
        assert list(tensors_within(nothing_inside)) == []

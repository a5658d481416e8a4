"""sketch_(model, rest=...): which modules run inside packing, what that survives, and that nothing stays on."""

import copy
import gc
import inspect
import io
import pickle
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import HashStore, init_device_mesh  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DataParallel
from torch.utils.checkpoint import checkpoint

from backsketch import (
    NoiseMonitor,
    RestConfig,
    SketchConfig,
    SketchedLinear,
    plan,
    profile,
    sketch_,
    summary,
    unsketch_,
)
from backsketch.changed_forward import changed_class
from backsketch.convert.converted_state import ConvertedState
from backsketch.masks.attention_mask import _HANDLES
from backsketch.rest import packing_modules
from backsketch.rest.packing_modules import rest_of, switch_off, switch_on
from cases import needs_shown_saves
from recorded_packing import recorded_packing

pytestmark = needs_shown_saves

CONFIG, OTHER = RestConfig(), RestConfig(norm=4)


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    yield from recorded_packing(monkeypatch)


class Block(nn.Module):
    """A block with a norm and a branch of its own."""

    def __init__(self, error=None):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.branch = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.error = error

    def forward(self, x, *, scale: float = 1.0):
        """Return x and its branch."""
        if self.error is not None:
            raise self.error
        return x + scale * self.branch(self.norm(x))


class Network(nn.Module):
    """Blocks in a list, one after the other."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x, attention_mask=None):
        for block in self.blocks:
            x = block(x)
        return self.head(x).tanh()


PACKING = {"", "blocks.0", "blocks.0.branch", "blocks.1", "blocks.1.branch"}


def batch():
    return torch.randn(4, 3, 8)


def classes(model):
    return {name: type(module) for name, module in model.named_modules()}


def packing_names(model):
    return set(packing_modules.present_rests(model))


def on(model, rest=True, **options):
    return sketch_(model, {"*": None}, rest=rest, **options)


# Which modules


def test_the_model_and_all_parts_that_have_parts_run_inside_packing(recorder):
    model: Any = sketch_(Network(), rest=True)
    assert packing_names(model) == PACKING
    x = batch()
    for call in (
        lambda: model(x),
        lambda: model.forward(x),
        lambda: model.blocks[1](x),
        lambda: model.blocks[0].branch(x),
    ):
        assert recorder.during(call) == [CONFIG]
    assert recorder.during(lambda: model.head(x)) == []


def test_it_is_off_in_eval_as_sketches_are(recorder):
    model: Any = on(Network())
    x = batch()
    assert recorder.during(lambda: model.eval()(x)) == []
    model.blocks[1].train()
    assert recorder.during(lambda: model(x)) == [CONFIG]


def test_a_model_without_parts_is_a_model_too(recorder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = sketch_(nn.GELU(), rest=True)  # and no linear layer, of which nothing is said: the rest is on
    assert recorder.during(lambda: model(batch())) == [CONFIG]
    assert type(unsketch_(model)) is nn.GELU


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(8, 8),
        nn.ModuleList([nn.Linear(8, 8)]),
        nn.ModuleList([nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))]),
    ],
)
def test_a_linear_layer_is_none_of_them_and_the_user_is_told(model):
    for _ in range(2):  # exact, then sketched
        with pytest.warns(UserWarning, match="rest has no effect: only linear layers of the model have a forward"):
            sketch_(model, rest=True)
        assert rest_of(model) is None
        assert SketchedLinear in classes(model).values()


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class StaticForward(Wrapper):
    @staticmethod
    def forward(x):
        return x


def with_own_forward():
    module = Wrapper(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    vars(module)["forward"] = partial(Wrapper.forward, module)
    return module


def parametrized():
    module = Wrapper(nn.Sequential(nn.Linear(8, 8)))
    module.weight = nn.Parameter(torch.ones(2, 2))
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())
    return module


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize(
    "make",
    [
        with_own_forward,
        parametrized,
        scripted,
        lambda: StaticForward(nn.Sequential(nn.Linear(8, 8))),
        lambda: DataParallel(nn.Sequential(nn.Linear(8, 8))),
    ],
)
def test_what_is_left_alone_itself(make):
    module = make()
    kind = type(module)
    model = on(nn.Sequential(module))
    assert type(module) is kind
    assert "" in packing_names(model)
    assert "0" not in packing_names(model)
    inner = [name for name in packing_names(model) if name]
    assert bool(inner) is (make is not scripted)  # its parts do it, unless they are compiled too
    unsketch_(model)
    assert type(module) is kind


# Classes


class Outer:
    class Inner(Wrapper):
        """Has a qualified name."""


@pytest.mark.parametrize("own", [Block, Outer.Inner, nn.Sequential, nn.MultiheadAttention])
def test_a_class_looks_like_its_own(own):
    kind = changed_class(own)
    assert kind is not own
    assert issubclass(kind, own)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(kind, name) == getattr(own, name)
    assert inspect.signature(kind.forward) == inspect.signature(own.forward)


def test_a_class_is_made_once_and_its_instances_look_like_ever():
    model = on(Network())
    block = model.blocks[0]
    assert type(block) is type(model.blocks[1]) is changed_class(Block)
    assert inspect.signature(block.forward) == inspect.signature(Block().forward)
    assert (block.forward.__name__, block.forward.__doc__) == ("forward", Block.forward.__doc__)
    assert repr(model) == repr(sketch_(Network(), {"*": None}, rest=True)) == repr(unsketch_(model))


def test_a_forward_that_is_patched_later_is_the_one_that_runs(recorder, monkeypatch):
    model = on(Network())
    monkeypatch.setattr(Network, "forward", lambda self, x: x + 1)
    x = batch()
    assert torch.equal(model(x), x + 1)
    assert recorder.entered == [CONFIG]


def test_a_class_made_at_run_time_is_not_kept_alive():
    class Local(Wrapper):
        pass

    model = on(Local(nn.Linear(8, 8)))
    model(batch()).sum().backward()
    alive = weakref.ref(type(model)), weakref.ref(Local)
    del model, Local
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_a_new_instance_of_the_class_runs_as_its_own_class_does(recorder):
    model = on(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh()))
    part = model[1:]
    assert rest_of(part) is None
    assert recorder.during(lambda: part(batch())) == []
    switch_off(part)
    assert type(part) is nn.Sequential
    assert type(unsketch_(model)) is nn.Sequential


# Conversion


def test_unsketch_restores_the_very_classes_and_leaves_nothing_behind():
    model = Network()
    before, attributes = classes(model), {name: set(vars(module)) for name, module in model.named_modules()}
    sketch_(model, rest=8)
    assert classes(model) != before
    unsketch_(model)
    assert classes(model) == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_parameters_and_state_dict_are_untouched():
    model = Network()
    parameters, state = list(model.parameters()), list(model.state_dict())
    on(model)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == state
    Network().load_state_dict(model.state_dict())


def test_another_rest_replaces_and_none_leaves_it():
    model = sketch_(Network(), rest=True)
    kinds = classes(model)
    sketch_(model)
    assert set(packing_modules.present_rests(model).values()) == {CONFIG}
    sketch_(model, rest=OTHER)
    assert set(packing_modules.present_rests(model).values()) == {OTHER}
    assert classes(model) == kinds
    sketch_(model.blocks[0], rest=4)
    assert rest_of(model) == OTHER
    assert rest_of(model.blocks[0]) == RestConfig.of(4)
    assert rest_of(unsketch_(model)) is None


@pytest.mark.parametrize("rest", [False, "8", 1.5, 5, SketchConfig()])
def test_a_wrong_rest_is_refused_before_anything_changes(rest):
    model = Network()
    before = classes(model)
    with pytest.raises((TypeError, ValueError), match="rest"):
        sketch_(model, rest=rest)
    assert classes(model) == before


def test_a_torch_that_is_too_old_refuses_in_words(monkeypatch):
    monkeypatch.setattr(packing_modules, "SHOWS_WHAT_IS_SAVED", False)
    model = Network()
    before = classes(model)
    with pytest.raises(RuntimeError, match=r"rest=True needs torch 2\.8 or newer, got \d"):
        sketch_(model, rest=True)
    assert classes(model) == before
    sketch_(model)


def test_masks_are_followed_in_a_packing_class_too():
    model = Network()
    for _ in range(2):
        sketch_(model, rest=True)
        assert [name for name, module in model.named_modules() if _HANDLES in vars(module)] == [""]


def test_the_state_of_a_model_can_be_restored_after_another_conversion():
    model = sketch_(Network(), {"head": SketchConfig(ratio=0.5)}, rest=True)
    sketch_(model.blocks[1], {"*": None}, rest=OTHER)
    before, rests = classes(model), packing_modules.present_rests(model)
    state = ConvertedState.of(model)
    sketch_(model, rest=4, checkpointed=False)
    state.restore(model)
    assert classes(model) == before
    assert packing_modules.present_rests(model) == rests
    ConvertedState.of(Network()).restore(model)
    assert classes(model) == classes(Network())


def test_profile_and_plan_leave_the_model_as_it_was(recorder):
    model = sketch_(Network(), rest=OTHER)
    before, rests = classes(model), packing_modules.present_rests(model)
    x = torch.randn(64, 8)
    for measure, packs in ((lambda: profile(model, x), True), (lambda: plan(model, x, budget="50%"), False)):
        assert set(recorder.during(measure)) == ({OTHER} if packs else set())  # profile measures the whole step
        assert classes(model) == before
        assert packing_modules.present_rests(model) == rests


# What goes wrong in a forward


@pytest.mark.parametrize("error", [ValueError("broken off"), KeyboardInterrupt(), SystemExit()])
def test_a_forward_that_breaks_off_leaves_nothing_on(recorder, error):
    model = on(Network())
    model.blocks[1].error = error
    with pytest.raises(type(error)):
        model(batch())
    assert recorder.entered == [CONFIG]
    assert not recorder.open
    assert recorder.during(lambda: model.blocks[0](batch())) == [CONFIG]


# Copies


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        copy.copy,
        *(partial(lambda protocol, model: pickle.loads(pickle.dumps(model, protocol)), each) for each in range(6)),
        lambda model: _through_torch_save(model),
        lambda model: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(copy.deepcopy(model))))),
    ],
)
def test_copies_pack_and_are_independent(recorder, duplicate):
    model = sketch_(Network(), rest=OTHER)
    twin = duplicate(model)
    assert classes(twin) == classes(model)
    assert packing_modules.present_rests(twin) == packing_modules.present_rests(model)
    torch.manual_seed(1)
    x = batch()
    assert recorder.during(lambda: twin(x)) == [OTHER]
    assert torch.equal(twin(x), model(x))
    switch_off(nn.ModuleList([] if duplicate is copy.copy else [twin]))
    assert rest_of(model) == OTHER
    assert recorder.during(lambda: model(x)) == [OTHER]


def _through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class OwnPickling(Wrapper):
    def __reduce__(self):
        return type(self), (self.inner,)


class PicklingByFunction(Wrapper):
    def __reduce__(self):
        return made_again, (type(self), self.inner)


def made_again(kind, inner):
    return kind(inner)


@pytest.mark.parametrize("own", [OwnPickling, PicklingByFunction])
def test_a_class_that_is_copied_in_its_own_way_still_is(recorder, own):
    model = on(own(nn.Sequential(nn.Linear(8, 8), nn.GELU())))
    twin = copy.deepcopy(model)
    assert isinstance(twin, own)
    assert recorder.during(lambda: twin(batch())) == [CONFIG]  # of its part


def test_a_subclass_that_another_tool_made_is_copied_as_that():
    model = on(Wrapper(nn.GELU()))
    model.__class__ = type("Sub", (type(model),), {})
    assert type(copy.deepcopy(model)) is type(model)


def test_replicas_of_data_parallel_pack(recorder):
    model = on(Network())
    replica = model._replicate_for_data_parallel()
    assert type(replica) is type(model)
    assert recorder.during(lambda: replica(batch())) == [CONFIG]


def test_a_data_parallel_model_packs_in_the_model_inside(recorder):
    model = on(DataParallel(Network()))
    assert type(model) is DataParallel
    assert recorder.during(lambda: model(batch())) == [CONFIG]


# Other parts of torch


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model):
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def is_sharded(module):
    return isinstance(module, FSDPModule)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_sharded_model(recorder, one_rank, order):
    model: Any = sharded(Network()) if order == "after" else Network()
    before = classes(model)
    sketch_(model, rest=True)
    if order == "before":
        sharded(model)
    assert is_sharded(model)
    assert packing_names(model) == PACKING
    x = batch()
    assert recorder.during(lambda: model(x).sum().backward()) == [CONFIG]
    assert recorder.during(lambda: model.blocks[0](x)) == [CONFIG]
    sketch_(model, rest=OTHER)
    assert recorder.during(lambda: model(x).sum().backward()) == [OTHER]
    unsketch_(model)
    assert is_sharded(model)
    assert is_sharded(model.blocks[0])
    assert order == "before" or classes(model) == before
    assert recorder.during(lambda: model(x).sum().backward()) == []


@pytest.mark.parametrize("compiled", [lambda model: torch.compile(model, backend="eager", fullgraph=True), "in place"])
def test_compiled_code_is_left_as_it_is(recorder, compiled):
    torch._dynamo.reset()
    model = on(Network())
    x = batch()
    expected = unsketch_(copy.deepcopy(model))(x)
    if compiled == "in place":
        model.compile(backend="eager", fullgraph=True)
        call = model
    else:
        call = compiled(model)
    found = []
    assert recorder.during(lambda: found.append(call(x))) == []
    assert torch.equal(found[0], expected)
    assert recorder.during(lambda: model.blocks[0](x)) == [CONFIG]  # which is not compiled by itself
    unsketch_(model)
    assert torch.equal(call(x), expected)


def test_a_model_compiled_before_is_converted_inside(recorder):
    torch._dynamo.reset()
    model = Network()
    compiled: Any = torch.compile(model, backend="eager")
    before = type(compiled)
    on(compiled)
    assert type(compiled) is before
    assert rest_of(compiled) == rest_of(model) == CONFIG
    assert recorder.during(lambda: compiled(batch())) == []
    unsketch_(compiled)
    assert type(model) is Network


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_its_modules_as_ever(recorder, reentrant):
    model = on(Block())
    x = batch().requires_grad_()
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert recorder.entered == [CONFIG, CONFIG]  # forward and again; packing itself knows that it is inside


def test_script_is_refused_in_words():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            RuntimeError, match=r"torch.jit.script cannot compile .* backsketch.unsketch_\(model\) first"
        ):
            torch.jit.script(on(nn.Sequential(nn.ReLU())))
        torch.jit.script(unsketch_(on(nn.Sequential(nn.ReLU()))))


def test_attention_with_a_fast_path_computes_the_same():
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
    exact = copy.deepcopy(layer)
    on(layer)
    x = torch.randn(4, 5, 16)
    assert torch.equal(layer(x), exact(x))
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), exact.eval()(x))


def test_a_layer_parametrized_while_it_packs_stops_when_it_is_switched_off(recorder):
    model = on(Wrapper(nn.GELU()))
    model.weight = nn.Parameter(torch.ones(2, 2))
    nn.utils.parametrize.register_parametrization(model, "weight", nn.Identity())
    assert recorder.during(lambda: model(batch())) == [CONFIG]
    switch_on(model, OTHER)
    assert recorder.during(lambda: model(batch())) == [OTHER]
    unsketch_(model)
    assert rest_of(model) is None
    assert recorder.during(lambda: model(batch())) == []
    nn.utils.parametrize.remove_parametrizations(model, "weight")
    assert type(unsketch_(model)) is Wrapper


# Reports


def test_the_monitor_says_what_it_does_not_see():
    model = sketch_(Network(), SketchConfig(ratio=0.5))
    told = []
    for rest in (None, True):
        sketch_(model, SketchConfig(ratio=0.5), rest=rest)
        with NoiseMonitor(model) as monitor:
            F.mse_loss(model(batch()), torch.zeros(4, 3, 2)).backward()
        told.append("without the noise of everything else that the model keeps in few bits" in str(monitor))
    assert told == [False, True]


def test_the_summary_reads_it():
    assert summary(sketch_(Network(), rest=OTHER)).rest == OTHER
    assert summary(Network()).rest is None

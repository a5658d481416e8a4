"""checkpoint_: which blocks it finds, that gradients are exact, that less is kept, and that nothing stays behind."""

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import HashStore, init_device_mesh  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule, fully_shard

from backsketch import RestConfig, SketchConfig, SketchedLinear, saved_memory, sketch_, summary, unsketch_
from backsketch.convert.checkpointed_blocks import blocks_of, checkpoint_, present_blocks, uncheckpoint_
from backsketch.convert.converted_state import ConvertedState
from backsketch.masks.attention_mask import ignore_attention_mask
from backsketch.memory.peak import peak_memory
from backsketch.rest.packing_modules import present_rests
from cases import needs_shown_saves

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Dropout(0.2)
        self.ran = 0

    def forward(self, x, *, scale=None, module=None, error=None):
        self.ran += 1
        if error is not None:
            raise error
        return x + self.dropout(self.down(F.gelu(self.up(x)))) * (1 if scale is None else scale)


class Network(nn.Module):
    """Blocks in a list that has another member too, which has a list inside."""

    def __init__(self, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList([*(Block() for _ in range(depth)), nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh())])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, attention_mask=None, **options):
        for block in self.blocks[:-1]:
            x = block(x, scale=self.scale * 1.0, module="a name that is taken", **options)
        return self.blocks[-1](x)


def step(model, x=None, **options):
    """Return the output, all gradients and the bytes kept, for one seed."""
    torch.manual_seed(1)
    model.zero_grad()
    with saved_memory(model) as saved:
        out = model(torch.randn(8, 16, WIDTH) if x is None else x, **options)
    kept = saved.activations
    out.square().sum().backward()
    return out.detach(), [parameter.grad.clone() for parameter in model.parameters()], kept


def equal(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def test_gradients_are_bit_equal_with_dropout_and_less_is_kept():
    model = Network()
    out, gradients, before = step(model)
    kept = {}
    for count in range(4):
        checkpoint_(model, blocks_of(model)[:count])
        other, others, kept[count] = step(model)
        assert torch.equal(out, other)
        assert equal(gradients, others)
    assert kept[0] == before
    assert [kept[count] - kept[count + 1] for count in range(3)] == [kept[0] - kept[1]] * 3
    assert kept[0] > 2 * kept[3]
    assert [block.ran for block in model.blocks[:3]] == [2 + 2 * 3, 3 + 2 * 2, 4 + 2 * 1]


def test_nothing_runs_twice_in_eval_or_without_gradients():
    model = checkpoint_(Network(), ["blocks.0"])
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        model(x)
    model.eval()(x).sum().backward()
    assert model.blocks[0].ran == 2


def test_it_is_undone_and_leaves_nothing_behind():
    model: nn.Module = Network()
    state, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    for undo in (uncheckpoint_, unsketch_):
        checkpoint_(model, blocks_of(model))
        assert present_blocks(model) == blocks_of(model) == ("blocks.0", "blocks.1", "blocks.2")
        assert list(model.state_dict()) == state
        assert isinstance(model.get_submodule("blocks.0"), Block)
        assert undo(model) is model
        assert [type(module) for module in model.modules()] == kinds
        assert [set(vars(module)) for module in model.modules()] == attributes
        assert present_blocks(model) == ()


def test_copies_and_pickles_are_checkpointed_too():
    model = sketch_(checkpoint_(Network(), ["blocks.1"]), SketchConfig(ratio=0.5), rest=8)
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(whole, weights_only=False)
    other: Any
    for other in copies:
        assert present_blocks(other) == ("blocks.1",)
        before = model.blocks[1].ran, other.blocks[1].ran
        step(other)
        assert (model.blocks[1].ran, other.blocks[1].ran) == (before[0], before[1] + 2)
        assert [type(module) for module in unsketch_(other).modules()] == [type(each) for each in Network().modules()]


def test_an_error_inside_leaves_no_checkpoint_open():
    model = checkpoint_(Network(), ["blocks.0"])
    for error in (ValueError("inside"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            model(torch.randn(2, WIDTH), error=error)
    assert equal(step(model)[1], step(uncheckpoint_(model))[1])


@pytest.mark.parametrize("order", ["rest first", "checkpoints first"])
@needs_shown_saves
def test_rest_packs_the_inputs_of_blocks_on_request_and_nothing_inside(order):
    x = torch.randn(8, 16, WIDTH)
    seen = {}
    for bits in (None, 8):
        model = Network()
        config = RestConfig(checkpoint=bits, min_elements=1024)
        if order == "rest first":
            sketch_(model, {"*": None}, rest=config)
        checkpoint_(model, blocks_of(model))
        if order == "checkpoints first":
            sketch_(model, {"*": None}, rest=config)
        seen[bits] = step(model, x)
        assert present_rests(uncheckpoint_(model))
        assert [type(module) for module in unsketch_(model).modules()] == [type(each) for each in Network().modules()]
    size = {bits: kept for bits, (_, _, kept) in seen.items()}
    head = 8 * 16 * (WIDTH + 4) * 4
    assert 3 * x.nbytes <= size[None] < 3 * x.nbytes + head
    assert 0.7 * 2 * x.nbytes < size[None] - size[8] < 0.75 * 2 * x.nbytes  # the batch itself is no activation


@needs_shown_saves
def test_sketched_layers_inside_are_exact_where_asked():
    model = Network()
    model.apply(lambda module: setattr(module, "p", 0.0))  # a sketch draws a seed, and dropout would draw another mask
    exact = step(model)[1]
    checkpoint_(model, blocks_of(model))
    first = {"blocks.0.*": SketchConfig(ratio=0.25)}
    assert not equal(step(sketch_(model, first))[1], exact)
    assert equal(step(sketch_(model, first, checkpointed=False))[1], exact)
    assert type(model.blocks[0].up) is SketchedLinear


def test_masks_hold_in_the_second_pass_too():
    """A sketch of as many rows as count is exact if the padded ones are left out."""
    mask = torch.ones(8, 16, dtype=torch.long)
    mask[:, 8:] = 0
    x = torch.randn(8, 16, WIDTH) * mask[..., None]

    def gradients(model):
        model.apply(lambda module: setattr(module, "p", 0.0))
        model.zero_grad()
        (model(x, attention_mask=mask) * mask[..., None]).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    model = Network()
    exact = gradients(model)
    sketch_(model, SketchConfig(ratio=0.5))
    for sketched in (model, checkpoint_(model, blocks_of(model))):
        for one, other in zip(gradients(sketched), exact, strict=True):
            assert torch.allclose(one, other, atol=1e-5)
    ignore_attention_mask(model)
    assert not torch.allclose(gradients(model)[-2], exact[-2], atol=1e-5)


def test_wrong_blocks_are_refused_before_anything_changes():
    model: nn.Module = Network()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"got \['layers.0'\]; its repeated blocks: blocks.0, blocks.1, blocks.2"):
        checkpoint_(model, ["blocks.0", "layers.0"])
    for name, reason in (("blocks", "it has no forward"), ("blocks.0.up", "it is a linear layer")):
        with pytest.raises(ValueError, match=f"block '{name}' cannot be checkpointed: {reason}"):
            checkpoint_(model, ["blocks.0", name])
    model.get_submodule("blocks.1").forward = lambda x: x
    with pytest.raises(ValueError, match="its forward was replaced, as accelerate's hooks do"):
        checkpoint_(model, ["blocks.0", "blocks.1"])
    for wrong in ("blocks.0", None, 3):
        with pytest.raises(TypeError, match="blocks must be names of modules"):
            checkpoint_(model, wrong)  # type: ignore[arg-type]
    assert [type(module) for module in model.modules()] == kinds


def test_the_state_of_a_model_and_its_summary_have_them():
    model = checkpoint_(sketch_(Network(), rest=8), ["blocks.0", "blocks.2"])
    assert "under activation checkpointing: blocks.0, 2" in str(summary(model))
    state = ConvertedState.of(model)
    unsketch_(model)
    state.restore(model)
    assert present_blocks(model) == ("blocks.0", "blocks.2")
    ConvertedState.of(Network()).restore(model)
    assert present_blocks(model) == ()


def test_blocks_of_lists_in_lists_are_the_outermost():
    inner = [nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))) for _ in range(2)]
    assert blocks_of(nn.Sequential(*inner)) == ("0", "1")
    assert blocks_of(inner[0]) == ("0", "1")
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.ReLU())) == ()
    towers = nn.ModuleDict({"first": inner[0], "second": inner[1]})
    assert blocks_of(towers) == ("first.0", "first.1", "second.0", "second.1")
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
    )
    assert blocks_of(encoder) == ("layers.0", "layers.1")


def test_transformers_and_their_caches():
    from small import MODELS, transformers

    names = {
        "roberta": "roberta.encoder.layer.",
        "gpt2": "transformer.h.",
        "llama": "model.layers.",
        "vit": "vit.",
    }
    for make in MODELS:
        model, batch = make()
        blocks = blocks_of(model)
        assert len(blocks) == 2
        assert all(block.startswith(names[make.__name__]) for block in blocks)
        out = {}
        for count in (0, 1, 2):
            torch.manual_seed(3)
            model.train().zero_grad()
            checkpoint_(model, blocks[:count])
            with peak_memory(model) as peak:
                model(**batch).loss.backward()
            out[count] = [p.grad.clone() for p in model.parameters() if p.grad is not None], peak.total
        assert equal(out[0][0], out[1][0])
        assert equal(out[0][0], out[2][0])
        assert out[0][1] > out[1][1]
    t5 = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    assert [name.partition(".")[0] for name in blocks_of(transformers.T5ForConditionalGeneration(t5))] == [
        "encoder", "encoder", "decoder", "decoder",
    ]  # fmt: skip


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_sharded_model(one_rank, order):
    model: Any = Network()
    expected = step(model)[1]
    mesh = init_device_mesh("cpu", (1,))
    if order == "before":
        checkpoint_(model, ["blocks.0"])
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    kind = type(model.blocks[0])
    if order == "after":
        checkpoint_(model, ["blocks.0"])
    assert equal([gradient.full_tensor() for gradient in step(model)[1]], expected)
    assert model.blocks[0].ran == 1 + 2
    uncheckpoint_(model)
    assert issubclass(type(model.blocks[0]), FSDPModule)
    assert order == "before" or type(model.blocks[0]) is kind
    step(model)
    assert model.blocks[0].ran == 1 + 2 + 1


def test_a_compiled_model():
    torch._dynamo.reset()
    make = functools.partial(nn.Sequential, nn.Linear(4, 4), nn.Tanh())
    model: Any = checkpoint_(nn.Sequential(make(), make()), ["0", "1"])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = model[0][0].weight.grad.clone()
    model.zero_grad()
    compiled(x).sum().backward()
    assert torch.allclose(model[0][0].weight.grad, expected)

"""Inputs that the operation before keeps anyway: a layer keeps the same memory, for nothing, and is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backsketch import NoiseMonitor, SketchConfig, profile, saved_memory, sketch_, summary, unsketch_
from cases import needs_shown_saves

pytestmark = needs_shown_saves

CONFIG = SketchConfig(ratio=0.25)
BATCH, LENGTH, HEADS, WIDTH = 4, 16, 2, 8


def attention(x):
    """Run as transformers does: heads are views, and so is what is read after."""
    heads = x.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)


HOLDING: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": attention,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "relu in place": lambda x: (x * 1).relu_(),
    "a view of relu": lambda x: x.relu().view(BATCH * LENGTH, WIDTH)[: BATCH * LENGTH - 1],
    "a part of relu": lambda x: torch.cat((x, x), -1).relu().chunk(2, -1)[0],
}
LETTING_GO: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "product": lambda x: x * 2,
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "a copy of relu": lambda x: x.relu() * 2,
    "relu of another type": lambda x: x.relu().double().to(x.dtype),
}


class Network(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.operation = operation

    def forward(self, x):
        return self.second(self.operation(self.first(x)))


def step(model, x):
    model.zero_grad()
    with saved_memory(model) as saved:
        out = model(x)
    kept = saved.activations
    out.square().sum().backward()
    return kept, model.second.weight.grad.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", HOLDING | LETTING_GO)
def test_an_input_that_its_producer_keeps_is_kept_exactly_and_costs_nothing(operation, dtype):
    model = Network((HOLDING | LETTING_GO)[operation]).to(dtype)
    x = torch.randn(BATCH, LENGTH, WIDTH).to(dtype)
    found = profile(model, x, config=CONFIG, loss=lambda out: out.square().sum())
    exact_bytes, exact = step(model, x)
    only = {"second": CONFIG}
    bytes_kept, gradient = step(sketch_(model, only), x)
    if operation in HOLDING:
        assert bytes_kept == exact_bytes
        assert torch.equal(gradient, exact)
    else:
        assert bytes_kept < exact_bytes
        assert not torch.allclose(gradient, exact)
    unsketch_(model)
    sketch_(model, CONFIG)
    with saved_memory(model) as saved:
        loss = model(x).square().sum()
    assert found.kept_if_all == saved.activations, "predicted to the byte"
    assert loss.requires_grad


@pytest.mark.parametrize("cast", [False, True])
def test_autocast_reads_what_the_producer_holds_only_if_it_casts_nothing(cast):
    """ReLU of fp32 holds fp32, and the layer would keep bf16."""
    model, x = Network(torch.relu), torch.randn(BATCH, LENGTH, WIDTH)
    if not cast:
        x = x.bfloat16()
        model.bfloat16()
    gradients = []
    for converted in (False, True):
        if converted:
            sketch_(model, {"second": CONFIG})
        with torch.autocast("cpu", torch.bfloat16):
            model.operation = (lambda h: h.float().relu()) if cast else torch.relu
            gradients.append(step(model, x)[1])
    assert torch.equal(*gradients) != cast


def test_what_is_offloaded_is_not_held_and_is_not_fetched_back():
    fetched = []

    def fetch(packed):
        fetched.append(packed)
        return packed[0]

    model, x = sketch_(Network(torch.relu), CONFIG), torch.randn(BATCH, LENGTH, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.clone(),), fetch):
        out = model(x)
    assert not fetched
    out.sum().backward()


def test_a_layer_that_is_exact_here_is_monitored_without_noise():
    model, x = sketch_(Network(torch.relu), CONFIG), torch.randn(BATCH, LENGTH, WIDTH)
    with NoiseMonitor(model) as monitor:
        model(x).square().sum().backward()
    records: dict[Any, Any] = {record["layer"]: record for record in monitor.to_records()}
    assert records["first"]["sketch_variance"] > 0
    assert records["second"]["sketch_variance"] == 0
    assert records["second"]["sgd_variance"] > 0


def test_a_model_of_attention_keeps_no_sketch_of_its_output():
    """o_proj reads what SDPA keeps: the one-liner must not keep more for it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(50, (4, 32))

    def kept(model):
        with saved_memory(model) as saved:
            out = model(input_ids=ids, labels=ids)
        return saved.activations, out

    exact = kept(model)[0]
    sketch_(model, {"*.o_proj": SketchConfig.recommended()})
    assert len(summary(model).sketched) == 2
    assert kept(model)[0] == exact
    assert all("its input is held anyway" in layer.note for layer in summary(model).sketched)

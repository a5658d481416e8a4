"""Activation checkpointing: its two passes agree, whatever it keeps; a sketch that saves nothing there is told of."""

import itertools
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import backsketch
from backsketch import SketchConfig, sketch_, summary
from backsketch.linear import checkpointing
from cases import KINDS, needs_shown_saves, within_five_standard_errors

WIDTH, ROWS, DRAWS = 8, 32, 120
aten = torch.ops.aten


def save_every_second_product():
    """What torchtitan does: one product in two is computed again."""
    counts = itertools.count()

    def policy(context, operation, *args, **kwargs):
        product = operation in (aten.mm.default, aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if product and next(counts) % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


POLICIES = {
    "products": lambda: [aten.mm.default, aten.bmm.default, aten.addmm.default],
    "rows": lambda: [aten.index_select.default],
    "every second product": save_every_second_product,
    "everything": lambda: lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE,
    "nothing": list,
}
CONFIGS = [
    SketchConfig(kind=kind, ratio=0.5, bits=bits, center=center)
    for kind in KINDS
    for bits, center in ((None, True), (4, False), (8, True))
]


class Attention(nn.Module):
    """q, k and v read one input; o reads what a sketch of another layer would give a gradient near zero for."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, attention_mask=None):
        return self.o(nn.functional.gelu(self.q(x) + self.k(x) + self.v(x)))


def selective(layer, policy):
    return lambda x, **kwargs: checkpoint(
        layer, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy), **kwargs
    )


def projections(layer, forward, x, y, **kwargs):
    """Return the mean of ⟨Ĝ, G⟩/‖G‖² over draws of the sketches, for every weight."""
    weights = list(layer.parameters())
    exact = [weight.grad.clone() for weight in weights]
    samples = []
    for _ in range(DRAWS):
        layer.zero_grad()
        forward(x.clone().requires_grad_(), **kwargs).backward(y)
        samples.append(
            torch.stack([(w.grad * g).sum() / g.square().sum() for w, g in zip(weights, exact, strict=True)])
        )
    return torch.stack(samples)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_selective_checkpointing_is_unbiased_whatever_it_saves(config, policy):
    layer, x, y = Attention(), torch.randn(ROWS, WIDTH) + 0.5, torch.randn(ROWS, WIDTH)
    layer(x).backward(y)
    sketch_(layer, config)
    samples = projections(layer, selective(layer, POLICIES[policy]()), x, y)
    assert within_five_standard_errors(samples, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpointing_finds_masks_again_whatever_it_saves(policy):
    """All valid rows are kept: with its mask, and only with it, the gradient is exact."""
    layer, x, y = Attention(), torch.randn(4, 8, WIDTH), torch.randn(4, 8, WIDTH)
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[:, 4:] = 0
    y *= mask.unsqueeze(-1)
    layer(x).backward(y)
    exact = [weight.grad.clone() for weight in layer.parameters()]
    sketch_(layer, SketchConfig(ratio=0.5)).zero_grad()
    selective(layer, POLICIES[policy]())(x.requires_grad_(), attention_mask=mask).backward(y)
    for weight, expected in zip(layer.parameters(), exact, strict=True):
        torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpointing_around_other_hooks_runs_the_same_operations_twice(policy):
    layer, x, y = Attention(), torch.randn(ROWS, WIDTH) + 0.5, torch.randn(ROWS, WIDTH)
    layer(x).backward(y)
    sketch_(layer, SketchConfig(ratio=0.5))

    def region(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            hidden = layer.q(x) + layer.k(x) + layer.v(x)
        return layer.o(nn.functional.gelu(hidden))

    samples = projections(layer, selective(region, POLICIES[policy]()), x, y)
    assert within_five_standard_errors(samples, 1)


def ways():
    """Return the three ways to checkpoint, as functions of a layer and its input."""
    return {
        "non-reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
        "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
        "selective": lambda layer, x: selective(layer, [aten.mm.default])(x),
    }


@needs_shown_saves
@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("autocast", [False, True])
def test_layers_can_be_left_exact_inside_checkpoints_alone(way, autocast, monkeypatch):
    monkeypatch.setattr(checkpointing, "_warned", False)
    layer, x, y = Attention(), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(x).backward(y)
    exact = [weight.grad.clone() for weight in layer.parameters()]
    sketch_(layer, SketchConfig(ratio=0.25), checkpointed=False).zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ways()[way](layer, x.clone().requires_grad_()).backward(y)
    assert all(weight.grad.equal(expected) for weight, expected in zip(layer.parameters(), exact, strict=True))
    assert "exact inside activation checkpointing" in str(summary(layer))
    layer.zero_grad()
    layer(x).backward(y)
    assert not layer.q.weight.grad.allclose(exact[0])


@pytest.mark.parametrize("way", ways())
def test_a_sketch_inside_a_checkpoint_is_told_of_once(way, monkeypatch):
    monkeypatch.setattr(checkpointing, "_warned", False)
    layer, x = sketch_(Attention(), SketchConfig(ratio=0.5)), torch.randn(ROWS, WIDTH, requires_grad=True)
    layer(x).sum().backward()
    assert "checkpointing" not in str(summary(layer))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            ways()[way](layer, x).sum().backward()
    assert ["checkpointed=False" in str(each.message) for each in told] == [True]
    assert str(summary(layer)).count("inside activation checkpointing it saves little and adds noise") == 4


def test_summary_knows_of_transformers_checkpointing_before_it_runs():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = sketch_(transformers.LlamaForCausalLM(config), SketchConfig(ratio=0.5))
    assert "checkpointing" not in str(summary(model))
    model.gradient_checkpointing_enable()
    notes = {layer.name: layer.note for layer in summary(model).sketched}
    assert all(("checkpointing" in note) == (name != "lm_head") for name, note in notes.items())


@needs_shown_saves
def test_unsketched_layers_remember_nothing_of_checkpoints():
    layer = sketch_(Attention(), SketchConfig(ratio=0.5), checkpointed=False)
    backsketch.unsketch_(layer)
    assert all("checkpoint" not in name for module in layer.modules() for name in module.__dict__)


def test_checkpointed_must_be_true_or_false():
    with pytest.raises(TypeError, match="checkpointed must be True or False, got 'exact'"):
        sketch_(Attention(), checkpointed="exact")  # type: ignore[arg-type]


def test_no_warning_without_a_checkpoint(monkeypatch):
    monkeypatch.setattr(checkpointing, "_warned", False)
    layer = sketch_(Attention(), SketchConfig(ratio=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autograd.graph.save_on_cpu():
            out = layer(torch.randn(ROWS, WIDTH))
        out.sum().backward()
    assert not checkpointing._warned

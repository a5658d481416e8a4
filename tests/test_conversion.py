"""sketch_ and unsketch_: what changes, and what does not."""

import copy
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import backsketch
from backsketch import NoiseMonitor, SketchConfig, SketchedLinear, cost, profile, sketch_, summary, unsketch_

CONFIG = SketchConfig(ratio=0.5)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))


def kinds(model):
    return {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def configs(model):
    return {name: module.config for name, module in model.named_modules() if isinstance(module, SketchedLinear)}


def test_converts_in_place_and_back():
    model = mlp()
    modules, parameters = list(model.modules()), list(model.parameters())
    state = copy.deepcopy(model.state_dict())
    assert sketch_(model, CONFIG) is model
    assert set(kinds(model).values()) == {SketchedLinear}
    assert list(model.modules()) == modules
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert unsketch_(model) is model
    assert set(kinds(model).values()) == {nn.Linear}
    assert all("config" not in module.__dict__ for module in model.modules())


def test_a_single_layer_is_a_model_too():
    layer = nn.Linear(4, 4)
    sketch_(layer, CONFIG)
    assert type(layer) is SketchedLinear
    assert type(unsketch_(layer)) is nn.Linear


def test_without_a_config_it_takes_the_recommended_one():
    assert set(configs(sketch_(mlp())).values()) == {SketchConfig.recommended()}


def test_a_pattern_is_not_unused_because_where_says_no():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = sketch_(mlp(), {"0": CONFIG, "2.*": CONFIG}, where=lambda name, module: name == "0")
    assert told == []
    assert configs(model) == {"0": CONFIG}


def test_where_chooses_layers():
    model = sketch_(mlp(), CONFIG, where=lambda name, module: bool(module.out_features == 8))
    assert set(configs(model)) == {"0", "2.0"}
    assert "where() returned False" in str(summary(model))


def test_first_matching_pattern_wins_and_none_leaves_exact():
    other = SketchConfig(kind="hash", ratio=0.2)
    model = sketch_(mlp(), {"2.1": None, re.compile(r"2\.\d"): other, "*": CONFIG})
    assert configs(model) == {"0": CONFIG, "2.0": other}
    assert "left exact by '2.1'" in str(summary(model))
    model = sketch_(mlp(), {"0": CONFIG})
    assert configs(model) == {"0": CONFIG}
    assert "no pattern matches its name" in str(summary(model))


def test_a_name_is_a_pattern_for_itself():
    """What plan returns maps names, and a name may have characters that mean something else in a glob."""
    model = nn.ModuleDict({"[a]": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    sketch_(model, dict.fromkeys(["[a]", "b"], CONFIG))
    assert set(configs(model)) == {"[a]", "b"}


def test_converting_again_changes_the_config_or_restores():
    model = sketch_(mlp(), CONFIG)
    other = SketchConfig(dim=4)
    sketch_(model, {"0": other, "2.1": None})
    assert configs(model) == {"0": other, "2.0": CONFIG}
    assert kinds(model)["2.1"] is nn.Linear


def test_a_pattern_that_matches_nothing_is_told():
    with pytest.warns(UserWarning, match=r"pattern 'encoder\.\*' matches no linear layer"):
        sketch_(mlp(), {"encoder.*": None, "*": CONFIG})


def test_a_model_in_which_nothing_is_converted_is_told():
    with pytest.warns(UserWarning, match="converted no layer"):
        sketch_(nn.Sequential(nn.ReLU()), CONFIG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((mlp(), 0.5), "config must be a SketchConfig or a mapping"),
        ((mlp(), {"*": 0.5}), "config must be a SketchConfig, got 0.5"),
        ((mlp(), {3: CONFIG}), "pattern must be a string"),
        (("model", CONFIG), "model must be an nn.Module, got str"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_changes(arguments, message):
    with pytest.raises(TypeError, match=message):
        sketch_(*arguments)
    assert not isinstance(arguments[0], nn.Module) or set(kinds(arguments[0]).values()) == {nn.Linear}


def test_an_empty_mapping_is_refused():
    with pytest.raises(ValueError, match="at least one pattern"):
        sketch_(mlp(), {})


def test_an_optimiser_made_before_still_updates():
    model = mlp()
    optimiser = torch.optim.AdamW(model.parameters())
    sketch_(model, CONFIG)
    before = [parameter.clone() for parameter in model.parameters()]
    model(torch.randn(20, 6)).square().sum().backward()
    optimiser.step()
    assert all(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_hooks_survive_both_ways():
    model, calls = mlp(), []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    for convert in (lambda: sketch_(model, CONFIG), lambda: unsketch_(model)):
        convert()
        calls.clear()
        model(torch.randn(20, 6, requires_grad=True)).sum().backward()
        assert calls == ["forward", "backward"]


def test_tied_weights_stay_tied_and_a_module_used_twice_is_one():
    layer = nn.Linear(6, 6)
    model = nn.ModuleDict({"a": layer, "b": layer, "c": nn.Linear(6, 6)})
    model["c"].weight = layer.weight
    sketch_(model, CONFIG)
    assert model["a"] is model["b"]
    assert model["c"].weight is model["a"].weight
    x = torch.randn(10, 6)
    sum(part(x).sum() for part in model.values()).backward()
    assert layer.weight.grad is not None


def test_deepcopy_and_pickle_of_a_converted_model():
    model = sketch_(mlp(), {"2.1": None, "*": CONFIG})
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert configs(other) == configs(model)
        assert str(summary(other)) == str(summary(model))


class OwnForward(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class PackedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)


def test_what_is_left_alone_and_why():
    model = nn.ModuleDict(
        {
            "own": OwnForward(4, 4),
            "attention": nn.MultiheadAttention(4, 2),
            "lazy": nn.LazyLinear(4),
            "packed": PackedLinear(),
            "norm": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "frozen": nn.Linear(4, 4).requires_grad_(False),
            "plain": nn.Linear(4, 4),
        }
    )
    sketch_(model, CONFIG)
    report = summary(model)
    assert {layer.name for layer in report.sketched} == {"frozen", "plain"}
    reasons = {layer.name: layer.note for layer in report.exact}
    assert "subclass" in reasons["own"]
    assert "never calls it" in reasons["attention.out_proj"]
    assert "multiplies its own weights" in reasons["attention"]
    assert "run one batch" in reasons["lazy"]
    assert "PackedLinear is not nn.Linear" in reasons["packed"]
    assert "sketch it first" in reasons["norm"]
    text = str(report)
    assert "; 2 of 8 linear layers are sketched, 1 of them frozen" in text.splitlines()[0]
    assert "frozen: keeps nothing" in text
    assert "4 -> 4" in text


def test_a_layer_parametrized_after_it_was_sketched_is_reported_and_not_restored_without_a_word():
    """Its class is then one of torch's own making, below which no other class can be put."""
    model = sketch_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), CONFIG)
    nn.utils.parametrizations.weight_norm(model[0])
    assert [(layer.name, layer.note) for layer in summary(model).sketched] == [("0", str(CONFIG)), ("1", str(CONFIG))]
    with NoiseMonitor(model) as monitor:
        model(torch.randn(10, 4)).sum().backward()
    assert [record["layer"] for record in monitor.to_records()] == ["0", "1"]
    with pytest.warns(UserWarning, match=r"0 \(ParametrizedSketchedLinear\) .* stays sketched"):
        unsketch_(model)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert set(kinds(unsketch_(model)).values()) == {nn.Linear}


def test_a_layer_with_another_forward_is_left_alone_and_told():
    """As accelerate's hooks put there, bound to the class that the layer had then."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].forward = model[0].forward
    sketch_(model, SketchConfig(ratio=0.5))
    assert [type(layer) for layer in model] == [nn.Linear, SketchedLinear]
    assert "forward was replaced" in str(summary(model))
    model[1].forward = model[1].forward
    with pytest.warns(UserWarning, match=r"1 \(SketchedLinear\) has a forward of its own: it stays sketched"):
        unsketch_(model)
    model(torch.randn(3, 6)).sum().backward()


def test_a_frozen_weight_is_told_though_its_bias_trains():
    model = sketch_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), CONFIG)
    model[0].weight.requires_grad_(False)
    notes = [layer.note for layer in summary(model).sketched]
    assert notes == ["frozen: keeps nothing", str(CONFIG)]


def test_multihead_attention_still_trains():
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
    exact = copy.deepcopy(layer)
    sketch_(layer, CONFIG)
    assert set(configs(layer)) == {"linear1", "linear2"}
    x = torch.randn(4, 5, 16)
    assert torch.equal(layer(x), exact(x))
    layer(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    with torch.no_grad():  # the fast path of eval() reads the weights itself
        torch.testing.assert_close(layer.eval()(x), exact.eval()(x))


def test_a_mistake_in_where_leaves_the_model_as_it_was():
    model = mlp()

    def where(name, module):
        if name == "2.1":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        sketch_(model, CONFIG, where)
    assert set(kinds(model).values()) == {nn.Linear}


def test_what_a_layer_called_config_before_is_given_back():
    layer: Any = nn.Linear(4, 4)
    layer.config = {"its": "own"}
    for _ in range(2):
        sketch_(layer, CONFIG)
        assert layer.config is CONFIG
    assert unsketch_(layer).config == {"its": "own"}
    assert not [name for name in vars(layer) if "config" in name and name != "config"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: sketch_(model, CONFIG, where="2.*"), "where must be a function .*, got '2.*'"),  # type: ignore[arg-type]
        (lambda model: sketch_(model, 0.1), "config must be a SketchConfig or a mapping .*, got 0.1"),  # type: ignore[arg-type]
        (lambda model: sketch_(model, profile(model, torch.randn(4, 6))), "got Profile; give a profile as profile="),  # type: ignore[arg-type]
        (lambda model: sketch_(model, CONFIG, profile={}), "profile must be what backsketch.profile returns, got dict"),  # type: ignore[arg-type]
        (lambda model: cost("rows", 3, 3, 3), "config must be a SketchConfig, got 'rows'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_something_else_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call(mlp())


@pytest.mark.parametrize(
    "name",
    [
        *("sketch_", "unsketch_", "summary", "profile", "saved_memory", "peak_memory", "NoiseMonitor", "NoiseLimit"),
        *("blocks_of", "checkpoint_", "uncheckpoint_", "fuse_loss_", "unfuse_loss_", "ignore_attention_mask"),
        *("plan", "fit"),
    ],
)
def test_what_is_no_module_is_named(name):
    others: dict[str, Any] = {"checkpoint_": {"blocks": []}, "plan": {"budget": "10%"}, "fit": {"memory": "1GiB"}}
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got list"):
        getattr(backsketch, name)([mlp()], **others.get(name, {}))


def test_a_profile_of_another_model_is_told():
    found = profile(mlp(), torch.randn(400, 6))
    with pytest.warns(UserWarning, match="the profile has no layer 1"):
        sketch_(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), CONFIG, profile=found)

"""Layers that sketch_ leaves exact of itself, since a sketch would cost more than it saves: narrow ones and lora_B."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from backsketch import SketchConfig, plan, profile, saved_memory, sketch_, summary
from backsketch.convert.conversion import configs_for
from backsketch.convert.layer_classes import exact_type
from backsketch.convert.left_exact import narrow_reason
from backsketch.linear.keeping import kept_bytes
from small import gpt2, mixtral

BITS = SketchConfig(ratio=0.71, bits=4)
ROWS = 4096


def sketched(model):
    return {name for name, module in model.named_modules() if exact_type(module) is not None}


def reasons(model):
    return {layer.name: layer.note for layer in summary(model).exact}


def narrow_and_wide(dtype=torch.float32):
    return nn.Sequential(nn.Linear(1, 64), nn.GELU(), nn.Linear(64, 4), nn.GELU(), nn.Linear(4, 64)).to(dtype)


def kept(model, x):
    with saved_memory(model) as saved:
        out = model(x)
    size = saved.activations
    del out
    return size


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("features", "dtype", "config", "converted"),
    [
        (1, torch.float32, BITS, False),  # 89%
        (4, torch.float32, BITS, True),  # 27%
        (4, torch.bfloat16, BITS, False),  # 53%
        (5, torch.bfloat16, BITS, True),  # 50%: 4 bits take a byte for the last
        (8, torch.bfloat16, BITS, True),  # 36%
        (3, torch.float32, SketchConfig(ratio=1.0, bits=8), False),  # 58%
        (64, torch.bfloat16, SketchConfig(ratio=1.0, bits=8), True),  # 53%, and 52% of any wide input: as asked for
        (16, torch.bfloat16, SketchConfig(ratio=1.0, bits=8), False),  # 63%
        (1, torch.float32, SketchConfig(ratio=0.9), True),
        (1, torch.bfloat16, SketchConfig(ratio=0.1, center=True), True),
        (1, torch.float32, SketchConfig(dim=8, bits=4), True),  # of any batch worth sketching it keeps little
        (0, torch.float32, BITS, True),
    ],
)
def test_a_layer_that_would_keep_over_half_because_it_is_narrow_stays_exact(features, dtype, config, converted):
    layer = nn.Sequential(nn.Linear(features, 8, dtype=dtype), nn.Linear(512, 8, dtype=dtype))
    assert sketched(sketch_(layer, config)) == ({"0", "1"} if converted else {"1"})
    assert set(configs_for(layer, config)) == sketched(layer)


def test_the_reason_has_the_figure():
    model = sketch_(narrow_and_wide(torch.bfloat16), BITS)
    assert sketched(model) == {"2"}
    assert reasons(model) == {
        "0": "narrow: of 1 feature in bfloat16 it would keep 178% of the bytes",
        "4": "narrow: of 4 features in bfloat16 it would keep 53% of the bytes",
    }
    share = kept_bytes(BITS, 10**6, 4, 2) / (10**6 * 4 * 2)
    assert f"{share:.0%}" == "53%"


def test_a_conv1d_is_narrow_by_its_inputs():
    model, _ = gpt2()
    narrow = type(model.transformer.h[0].attn.c_attn)(64, 1)
    assert sketched(sketch_(nn.Sequential(narrow, nn.Linear(64, 4)), BITS)) == {"1"}


def test_patterns_do_not_make_a_narrow_layer_worth_it_and_one_that_was_sketched_is_restored():
    model = sketch_(narrow_and_wide(), SketchConfig(ratio=0.5))
    assert sketched(model) == {"0", "2", "4"}
    with pytest.warns(UserWarning, match="converted no layer"):
        sketch_(model, {"0": BITS})
    assert sketched(model) == {"2", "4"}
    assert "89%" in reasons(model)["0"]


def test_what_was_said_for_other_reasons_is_said_still():
    model = sketch_(narrow_and_wide(), {"0": None, "2": BITS})
    assert reasons(model) == {"0": "left exact by '0'", "4": "no pattern matches its name"}
    sketch_(model, BITS, where=lambda name, module: name != "0")
    assert reasons(model) == {"0": "where() returned False"}


def test_the_profile_says_what_sketch_does():
    model, x = narrow_and_wide(), torch.randn(ROWS, 1)
    found = profile(model, x, config=BITS)
    notes = {layer.name: layer.note for layer in found.layers}
    sketch_(model, BITS)
    assert notes["0"] == reasons(model)["0"]
    assert set(found.chosen) == set(found.pays) == sketched(model) == {"2", "4"}
    assert found.kept_after == found.kept_if_all == kept(model, x)


def test_the_profile_of_a_converted_model_says_why_a_layer_was_left():
    model = sketch_(narrow_and_wide(), BITS)
    notes = {layer.name: layer.note for layer in profile(model, torch.randn(ROWS, 1)).layers}
    assert notes["0"] == reasons(model)["0"]
    model.append(nn.Linear(64, 64))
    assert profile(model, torch.randn(ROWS, 1)).layers[-1].note == "not selected"


def test_a_layer_whose_forward_was_replaced_is_refused_by_the_profile_too():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model[2].forward = model[2].forward
    found = profile(model, torch.randn(ROWS, 64), config=BITS)
    assert found.pays == ("0",)
    assert "forward was replaced" in found.layers[1].note
    sketch_(model, BITS)
    assert found.kept_after == kept(model, torch.randn(ROWS, 64))


@pytest.mark.parametrize("budget", ["80%", "40%"])
@pytest.mark.parametrize("bits", [None, (8,), (4,)])
@pytest.mark.parametrize("features", [4, 64])
def test_a_plan_chooses_nothing_that_sketch_refuses(budget, bits, features):
    model, x = nn.Sequential(nn.Linear(features, 4), nn.GELU(), nn.Linear(4, 64)), torch.randn(ROWS, features)
    planned = plan(model, x, budget=budget, bits=bits)
    chosen = {name: config for name, config in planned.items() if config is not None}
    for name, config in chosen.items():
        assert narrow_reason(model.get_submodule(name), config) is None
    sketch_(model, planned)
    assert sketched(model) == chosen.keys()
    assert kept(model, x) == planned.kept_after


def test_a_plan_restores_what_it_leaves_exact():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(ROWS, 64)
    model[2].forward = model[2].forward
    planned = plan(model, x, budget="50%")
    assert planned["2"] is None


# lora_B


def attention(**options):
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"query": nn.Linear(64, 64), "value": nn.Linear(64, 64)})
    model.forward = lambda x: model["query"](x) + model["value"](x)
    options = {"r": 16, "target_modules": ["query", "value"], "init_lora_weights": False} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options))


@pytest.mark.parametrize("config", [None, SketchConfig(ratio=0.1), BITS], ids=str)
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True, "lora_bias": True}], ids=str)
def test_lora_b_stays_exact_under_a_config_for_all(config, options):
    model = sketch_(attention(**options), config)
    adapters = {name.split(".")[-2] for name in sketched(model) if "lora" in name}
    assert adapters == {"lora_A"}
    left = {name: note for name, note in reasons(model).items() if "lora_B" in name}
    assert len(left) == 2
    assert set(left.values()) == {"lora_B reads only 16 features: little to save, so only a pattern selects it"}
    model(torch.randn(32, 64)).sum().backward()


def test_a_pattern_that_matches_lora_b_is_honoured():
    model = sketch_(attention(), {"*lora_B*": SketchConfig(ratio=0.5)})
    assert {name.split(".")[-2] for name in sketched(model)} == {"lora_B"}
    both = sketch_(attention(), {"*": SketchConfig(ratio=0.5)})
    assert {"lora_A", "lora_B"} <= {name.split(".")[-2] for name in sketched(both)}


def test_a_layer_that_is_only_called_lora_b_is_converted():
    model = nn.ModuleDict({"lora_B": nn.ModuleDict({"default": nn.Linear(64, 64)})})
    assert sketched(sketch_(model)) == {"lora_B.default"}


def test_profile_and_plan_leave_lora_b_too():
    model, x = attention(), torch.randn(ROWS, 64)
    found = profile(model, x, config=BITS)
    assert not [name for name in found.pays if "lora_B" in name]
    assert all(layer.note.startswith("lora_B reads") for layer in found.layers if "lora_B" in layer.name)
    planned = plan(model, x, budget="20%")
    assert [name for name, config in planned.items() if config is not None and "lora_A" in name]
    assert {config for name, config in planned.items() if "lora_B" in name} == {None}
    sketch_(copy.deepcopy(model), SketchConfig(ratio=0.5), profile=found)


@pytest.mark.parametrize("name", ["AdaLoraConfig", "IA3Config", "LoHaConfig", "VeraConfig", "LoKrConfig"])
def test_other_adapters_are_converted_as_before(name):
    peft = pytest.importorskip("peft")
    known: dict[str, dict[str, Any]] = {
        "AdaLoraConfig": {"total_step": 10},
        "IA3Config": {"feedforward_modules": []},
        "VeraConfig": {"r": 4},
    }
    options = known.get(name, {})
    model = nn.ModuleDict({"query": nn.Linear(64, 64), "head": nn.Linear(64, 8)})
    model.forward = lambda x: model["head"](model["query"](x))
    adapted = peft.get_peft_model(
        model, getattr(peft, name)(target_modules=["query"], modules_to_save=["head"], **options)
    )
    sketch_(adapted)
    assert any("head" in name for name in sketched(adapted))
    assert str(summary(adapted))
    adapted(torch.randn(32, 64)).sum().backward()


# Adapters that multiply weights


def test_adapters_of_multihead_attention_are_merged_and_never_called():
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2, batch_first=True), "head": nn.Linear(32, 4)})
    model.forward = lambda x: model["head"](model["attention"](x, x, x)[0])
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["attention", "head"]))
    called = set()
    for name, module in adapted.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    sketch_(adapted)
    adapted(torch.randn(8, 6, 32)).sum().backward()
    told = {name for name, note in reasons(adapted).items() if note == "its weight is read and it is never called"}
    adapters = {name for name, module in adapted.named_modules() if "lora" in name and isinstance(module, nn.Linear)}
    assert told == adapters - called
    assert len(told) == 4
    assert sketched(adapted) <= called


def test_adapters_whose_weights_are_read_and_never_called_are_told():
    peft = pytest.importorskip("peft")
    model, _ = mixtral()
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    adapted = sketch_(peft.get_peft_model(model, lora))
    told = {name: note for name, note in reasons(adapted).items() if "experts" in name}
    assert {name.split(".")[-2] for name in told} == {"lora_A", "lora_B"}
    assert all("its weight is read and it is never called" in note for note in told.values())

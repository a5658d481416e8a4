"""PEFT: LoRA on converted models, converted LoRA models, merging, saving, and quantised bases."""

import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from backsketch import SketchConfig, SketchedLinear, sketch_, summary, unsketch_
from cases import saved_storages, within_five_standard_errors

ROWS, FEATURES, RANK = 40, 16, 2
CONFIG = SketchConfig(ratio=0.25)
SKETCHED = ROWS // 4 * FEATURES * 4


class Int8Linear(nn.Linear):
    """A stand-in for a quantised base: its own forward, integer codes for a weight, and nothing to train."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.scale = layer.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((layer.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))

    def forward(self, x):
        return self.query(x) + self.value(x)


def with_lora(model, **options):
    config = LoraConfig(target_modules=["query", "value"], r=RANK, init_lora_weights=False, **options)
    return get_peft_model(model, config)


def converted_then_lora():
    return sketch_(with_lora(sketch_(Attention(), CONFIG)), CONFIG)


def lora_then_converted():
    return sketch_(with_lora(Attention()), CONFIG)


def lora_on_a_quantised_base():
    model = Attention()
    model.query, model.value = Int8Linear(model.query), Int8Linear(model.value)
    return sketch_(with_lora(model), CONFIG)


WAYS = [converted_then_lora, lora_then_converted, lora_on_a_quantised_base]


def gradient_of(model, x, y):
    model.zero_grad()
    model(x).backward(y)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("way", WAYS)
def test_lora_a_trains_from_a_sketch_and_nothing_else_changes(way):
    model = way()
    exact = unsketch_(copy.deepcopy(model))
    x, y = torch.randn(ROWS, FEATURES), torch.randn(ROWS, FEATURES)
    torch.testing.assert_close(model(x), exact(x))
    expected = gradient_of(exact, x, y)
    runs = [gradient_of(model, x, y) for _ in range(300)]
    assert {name.split(".")[-3] for name in expected} == {"lora_A", "lora_B"}
    for name, gradient in expected.items():
        samples = torch.stack([run[name] for run in runs])
        assert bool(samples.std(0).max() > 0) == ("lora_A" in name), name
        assert within_five_standard_errors(samples, gradient.double(), 1e-4), name


@pytest.mark.parametrize("way", WAYS)
def test_the_input_of_lora_a_is_sketched_once_and_the_frozen_base_keeps_nothing(way):
    model = way()
    held = saved_storages(lambda: model(torch.randn(ROWS, FEATURES)))
    for tensor in [*model.parameters(), *(parameter.data for parameter in model.parameters())]:
        held.pop(tensor.untyped_storage().data_ptr(), None)
    of_b = ROWS * RANK * 4  # each lora_B keeps its own small input
    assert sorted(held.values(), reverse=True) == [SKETCHED, of_b, of_b, 8]


def test_dropout_makes_an_input_for_each_adapter_and_each_is_sketched():
    model = sketch_(with_lora(Attention(), lora_dropout=0.5), CONFIG)
    held = saved_storages(lambda: model(torch.randn(ROWS, FEATURES)))
    assert list(held.values()).count(SKETCHED) == 2
    assert ROWS * FEATURES * 4 not in held.values()


def test_the_report_names_every_part_and_no_wrapper():
    report = summary(lora_then_converted())
    assert {layer.name.split(".", 3)[-1] for layer in report.sketched} == {"base_layer", "lora_A.default"}
    assert {layer.name.split(".", 3)[-1] for layer in report.exact} == {"lora_B.default"}
    quantised = {layer.type: layer.note for layer in summary(lora_on_a_quantised_base()).exact}
    assert quantised.keys() == {"Int8Linear", "Linear"}
    assert "own its forward" in quantised["Int8Linear"]


@pytest.mark.parametrize("way", WAYS[:2])
def test_merging_gives_the_weights_of_an_unconverted_model(way):
    model = way()
    x = torch.randn(ROWS, FEATURES)
    expected = unsketch_(copy.deepcopy(model)).merge_and_unload()
    merged = model.merge_and_unload()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(merged.state_dict()[name], tensor)
    assert type(merged.query) is SketchedLinear
    torch.testing.assert_close(merged(x), expected(x))
    assert type(unsketch_(merged).query) is nn.Linear


def test_a_quantised_base_is_left_as_it_is():
    model = lora_on_a_quantised_base()
    codes = model.base_model.model.query.base_layer.weight.clone()
    gradient_of(model, torch.randn(ROWS, FEATURES), torch.randn(ROWS, FEATURES))
    unsketch_(model)
    base = model.base_model.model.query.base_layer
    assert type(base) is Int8Linear
    assert base.weight.dtype == torch.int8
    assert torch.equal(base.weight, codes)


def test_saved_adapters_load_into_an_unconverted_model(tmp_path):
    base = Attention()
    plain = copy.deepcopy(base)
    model = sketch_(with_lora(base), CONFIG)
    x, y = torch.randn(ROWS, FEATURES), torch.randn(ROWS, FEATURES)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    gradient_of(model, x, y)
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(plain, tmp_path)
    torch.testing.assert_close(loaded(x), model(x))
    assert not summary(loaded).sketched


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_compiled_lora_model_keeps_a_sketch():
    torch._dynamo.reset()
    model = lora_then_converted()
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    held = saved_storages(lambda: call(torch.randn(ROWS, FEATURES)))
    assert list(held.values()).count(SKETCHED) == 1
    assert ROWS * FEATURES * 4 not in held.values()

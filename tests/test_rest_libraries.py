"""sketch_(model, rest=...) with transformers, PEFT and accelerate, which read, wrap and replace a model's forward."""

import copy
import inspect
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from backsketch import RestConfig, sketch_, summary, unsketch_
from backsketch.rest.packing_modules import rest_of
from recorded_packing import recorded_packing
from small import llama

CONFIG = RestConfig()


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    yield from recorded_packing(monkeypatch)


def classes(model):
    return {name: type(module) for name, module in model.named_modules()}


# transformers


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_language_model_trains_generates_and_is_saved_as_ever(recorder, tmp_path, checkpointing):
    model: Any
    model, inputs = llama()
    own = classes(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    sketch_(model, rest=True)
    assert inspect.signature(model.forward) == inspect.signature(LlamaForCausalLM.forward.__get__(model))
    assert recorder.during(lambda: model(**inputs).loss.backward())[:1] == [CONFIG]
    states = model(**inputs, output_hidden_states=True).hidden_states
    assert len(states) == 3
    assert type(model).can_generate()
    prompt = inputs["input_ids"][:1, :4]
    model.eval()
    generated = model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.save_pretrained(tmp_path)
    assert LlamaForCausalLM.from_pretrained(tmp_path).config.architectures == ["LlamaForCausalLM"]
    again = type(model).from_pretrained(tmp_path)
    assert rest_of(again) is None
    assert classes(unsketch_(model)) == own
    assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0), generated)


# PEFT


def lora(model):
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2))


@pytest.mark.parametrize("order", ["before", "after"])
def test_lora_on_a_model_and_a_model_with_lora(recorder, tmp_path, order):
    plain, inputs = llama()
    if order == "after":
        model: Any = lora(plain)
        own = classes(model)
        sketch_(model, rest=True)
    else:
        model = lora(sketch_(plain, rest=True))
        own = classes(lora(llama()[0]))
    assert summary(model).rest == CONFIG
    assert recorder.during(lambda: model(**inputs).loss.backward()) == [CONFIG]
    assert recorder.during(lambda: model.base_model(**inputs)) == [CONFIG]  # which calls forward, not the module
    twin = copy.deepcopy(model)
    assert recorder.during(lambda: twin(**inputs)) == [CONFIG]
    model.save_pretrained(tmp_path)
    PeftModel.from_pretrained(llama()[0], tmp_path)
    assert {name: kind.__name__ for name, kind in classes(unsketch_(model)).items()} == {
        name: kind.__name__ for name, kind in own.items()
    }
    assert order == "before" or classes(model) == own
    assert recorder.during(lambda: model(**inputs)) == []
    assert type(model.merge_and_unload()) is LlamaForCausalLM


# accelerate


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x)


def test_a_model_that_accelerate_prepares(recorder, accelerator):
    x = torch.randn(4, 8)
    model = sketch_(Regression(), rest=True)
    prepared = accelerator.prepare_model(model)
    assert "forward" in vars(prepared)
    assert prepared(x).dtype == torch.float32
    assert recorder.during(lambda: prepared(x).sum().backward()) == [CONFIG]
    sketch_(prepared, rest=4)
    assert recorder.during(lambda: prepared(x)) == [RestConfig.of(4)]
    assert classes(unsketch_(accelerator.unwrap_model(prepared))) == classes(Regression())
    assert recorder.during(lambda: prepared(x).sum().backward()) == []


def test_a_model_converted_after_accelerate_prepared_it_packs_in_its_parts(recorder, accelerator):
    x = torch.randn(4, 8)
    prepared = accelerator.prepare_model(Regression())
    sketch_(prepared, rest=True)
    assert type(prepared) is Regression
    assert recorder.during(lambda: prepared(x).sum().backward()) == [CONFIG]
    assert classes(unsketch_(prepared)) == classes(Regression())


def test_hooks_of_accelerate_come_and_go(recorder):
    x = torch.randn(4, 8)
    model = sketch_(Regression(), rest=True)
    add_hook_to_module(model, ModelHook())
    assert recorder.during(lambda: model(x)) == [CONFIG]
    remove_hook_from_module(model)
    assert recorder.during(lambda: model(x)) == [CONFIG]
    unsketch_(model)
    assert recorder.during(lambda: model(x)) == []

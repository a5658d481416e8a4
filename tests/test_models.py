"""Real architectures from transformers, small and random: convert, train, restore."""

import copy
import pickle

import pytest
import torch

from backsketch import SketchConfig, SketchedLinear, sketch_, summary, unsketch_
from backsketch.convert.layer_classes import exact_type

transformers = pytest.importorskip("transformers")

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
CONFIGS = [SketchConfig(ratio=0.25), SketchConfig(kind="hadamard", ratio=0.25, block=16)]


def text(vocabulary=100):
    ids = torch.randint(5, vocabulary, (4, 12))
    return {"input_ids": ids, "labels": ids}


def roberta():
    config = transformers.RobertaConfig(vocab_size=100, max_position_embeddings=32, **TINY)
    return transformers.RobertaForMaskedLM(config), text()


def bert():
    config = transformers.BertConfig(vocab_size=100, max_position_embeddings=32, num_labels=3, **TINY)
    inputs = {"input_ids": torch.randint(5, 100, (4, 12)), "labels": torch.randint(0, 3, (4,))}
    return transformers.BertForSequenceClassification(config), inputs


def gpt2():
    config = transformers.GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config), text()


def llama():
    config = transformers.LlamaConfig(vocab_size=100, num_key_value_heads=1, tie_word_embeddings=True, **TINY)
    return transformers.LlamaForCausalLM(config), text()


def t5():
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), text()


def vit():
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=3, **TINY)
    inputs = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 3, (4,))}
    return transformers.ViTForImageClassification(config), inputs


def shared(model):
    """Return the groups of parameter names that are one tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("make", [roberta, bert, gpt2, llama, t5, vit])
def test_converts_trains_and_restores(make, config):
    model, inputs = make()
    model.train()
    state, tied, classes = copy.deepcopy(model.state_dict()), shared(model), [type(m) for m in model.modules()]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outputs = []
    hook = next(m for m in model.modules() if isinstance(m, torch.nn.Linear)).register_forward_hook(
        lambda *_: outputs.append(1)
    )

    sketch_(model, config)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert shared(model) == tied
    assert len(summary(model).sketched) > 8

    losses = []
    for _ in range(3):
        loss = model(**inputs).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert all(torch.tensor(losses).isfinite())
    assert outputs
    hook.remove()
    sketched = [module for module in model.modules() if exact_type(module)]
    for module in sketched:
        name = next(name for name, other in model.named_modules() if other is module)
        assert not torch.equal(module.weight, state[f"{name}.weight"]), name

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    unsketch_(model)
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("make", [roberta, gpt2, llama])
def test_the_gradient_of_a_whole_model_at_ratio_one_is_exact(make):
    model, inputs = make()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def grads():
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    exact = grads()
    sketch_(model, SketchConfig(ratio=1.0))
    assert all(torch.equal(one, other) for one, other in zip(exact, grads(), strict=True))


def test_gpt2_conv1d_is_sketched_and_reported():
    model, _ = gpt2()
    sketch_(model, SketchConfig(ratio=0.25))
    report = {layer.name: layer for layer in summary(model).sketched}
    attention = report["transformer.h.0.attn.c_attn"]
    assert (attention.type, attention.shape) == ("SketchedConv1D", "32 -> 96")
    assert "ratio=0.25" in repr(model.transformer.h[0].attn.c_attn)
    assert isinstance(model.lm_head, SketchedLinear)

"""sketch_(model, rest=...) on whole architectures: what they keep against exact, their outputs, and their gradients."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from backsketch import RestConfig, profile, saved_memory, sketch_, summary, unsketch_
from backsketch.memory.meta_device import meta_step
from backsketch.rest.saving import observe_saving
from cases import needs_shown_saves, within_five_standard_errors
from small import gpt2, llama, mixtral, roberta, text, transformers, vit

pytestmark = needs_shown_saves


# What is kept, at the width of real models and few layers deep. The meta device computes nothing.


def ids(batch, length):
    return torch.randint(5, 100, (batch, length))


def wide_roberta(batch=32, dropout=0.0, attention="sdpa"):
    config = transformers.RobertaConfig(
        vocab_size=100, num_hidden_layers=3, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.RobertaModel(config, add_pooling_layer=False), {"input_ids": ids(batch, 128)}


def wide_gpt2():
    config = transformers.GPT2Config(
        vocab_size=100, n_layer=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False
    )
    return transformers.GPT2Model(config), {"input_ids": ids(8, 512)}


def wide_llama(key_heads=12, attention="sdpa"):
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=768, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=12,
        num_key_value_heads=key_heads, use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaModel(config), {"input_ids": ids(8, 512)}


def wide_llama_with_lora(**options):
    model, inputs = wide_llama(key_heads=4)
    return get_peft_model(model, LoraConfig(r=16, **options)), inputs


def wide_t5():
    config = transformers.T5Config(
        vocab_size=100, d_model=768, d_ff=3072, num_heads=12, num_layers=2, dropout_rate=0.0, use_cache=False
    )
    return transformers.T5Model(config), {"input_ids": ids(16, 128), "decoder_input_ids": ids(16, 128)}


def wide_vit():
    config = transformers.ViTConfig(num_hidden_layers=2)
    return transformers.ViTModel(config, add_pooling_layer=False), {"pixel_values": torch.randn(8, 3, 224, 224)}


def wide_whisper():
    config = transformers.WhisperConfig(
        vocab_size=100, d_model=512, encoder_layers=2, decoder_layers=2, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(2, 80, 3000), "decoder_input_ids": ids(2, 200)}
    return transformers.WhisperModel(config), inputs


def wide_mixtral(experts):
    config = transformers.MixtralConfig(
        vocab_size=100, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, use_cache=False, experts_implementation=experts,
    )  # fmt: skip
    return transformers.MixtralModel(config), {"input_ids": ids(4, 128)}


@pytest.fixture(scope="module")
def wide_mamba():
    def make():
        config = transformers.MambaConfig(vocab_size=100, hidden_size=256, num_hidden_layers=2, use_cache=False)
        return transformers.MambaModel(config), {"input_ids": ids(4, 32)}

    return make


def kept_bytes(model, inputs):
    with saved_memory(model) as saved:
        loss = model(**inputs).last_hidden_state.float().mean()
    del loss
    return saved.most_activations


def share(make, device="meta", dtype=torch.float32, **options):
    """Return the bytes that a model with rest keeps, the logits and the loss left out, as a share of exact ones."""
    with torch.device(device), ExitStack() as stack:
        model, inputs = make(**options)
        model = model.to(dtype).train()
        inputs = {name: each.to(dtype) if each.is_floating_point() else each for name, each in inputs.items()}
        if device == "meta":
            stack.enter_context(meta_step())
        exact = kept_bytes(model, inputs)
        return kept_bytes(sketch_(model, rest=True), inputs) / exact


SHARES: dict[str, tuple[Any, dict[str, Any], float]] = {
    "roberta": (wide_roberta, {}, 0.17),
    "roberta, dropout": (wide_roberta, {"dropout": 0.1}, 0.17),
    "roberta, eager": (wide_roberta, {"attention": "eager"}, 0.22),
    "gpt2": (wide_gpt2, {}, 0.19),
    "llama": (wide_llama, {}, 0.19),
    "llama, grouped": (wide_llama, {"key_heads": 4}, 0.19),
    "llama, eager": (wide_llama, {"attention": "eager", "key_heads": 4}, 0.22),
    "t5": (wide_t5, {}, 0.19),
    "vit": (wide_vit, {}, 0.19),
    "whisper": (wide_whisper, {}, 0.19),
    "llama, lora": (wide_llama_with_lora, {"target_modules": ["q_proj", "v_proj"]}, 0.25),
    "llama, lora everywhere": (wide_llama_with_lora, {"target_modules": "all-linear", "lora_dropout": 0.05}, 0.25),
}
HALF = ["roberta", "gpt2", "llama", "llama, grouped", "t5", "vit", "whisper"]


@pytest.mark.parametrize("name", SHARES)
def test_a_whole_step_keeps_a_small_share_of_its_bytes(name):
    make, options, bound = SHARES[name]
    assert share(make, **options) <= bound


@pytest.mark.parametrize("name", HALF)
def test_a_whole_step_in_bf16_keeps_a_small_share_of_its_bytes(name):
    make, options, bound = SHARES[name]
    assert share(make, dtype=torch.bfloat16, **options) <= 2 * bound


EXPERTS = ["eager", "grouped_mm", "batched_mm"]


@pytest.mark.parametrize("experts", EXPERTS)
def test_experts_keep_a_small_share(experts):
    assert share(wide_mixtral, "cpu", experts=experts) <= 0.19


def small_experts(name, experts):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 100, "num_key_value_heads": 2, "experts_implementation": experts}
    if name == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
    else:
        sizes |= {"num_local_experts": 4}
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
    return model.train(), text()


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_inputs_of_experts_are_packed_once_each_and_told_of(name, experts):
    """Both of an expert's inputs: of gate and up, which share one, and of down; batched_mm keeps weights too."""
    model, inputs = small_experts(name, experts)
    sketch_(model, rest=RestConfig(min_elements=64))
    seen: list[tuple[Any, Any]] = []

    def note(family, tensor, kept):
        if family == "experts":
            seen.append((tensor, kept))

    with observe_saving(note):
        loss = model(**inputs).loss
    packed = [kept for _, kept in seen if kept is not None]
    assert packed
    assert all(kept.memory.bits == 4 for kept in packed)
    assert len({id(kept.memory) for kept in packed}) == len(packed)
    if experts != "batched_mm":
        assert all(kept.memory.rotated for kept in packed)
        tokens = 2 * inputs["input_ids"].numel()  # each goes to two experts
        assert sum(tensor.numel() for tensor, kept in seen if kept is not None) == tokens * (32 + 48)
    loss.backward()
    reasons = [each.reason for each in summary(model).unreached if len(each.shape) == 3]
    assert reasons
    assert all(reason.endswith("rest keeps its input in few bits") for reason in reasons)
    found = {family.name: family for family in profile(model, **inputs).families}
    assert 0 < found["experts"].after < 0.5 * found["experts"].before


@pytest.mark.parametrize("experts", EXPERTS)
def test_gradients_of_experts_are_unbiased(experts):
    model, inputs = small_experts("Mixtral", experts)
    exact = gradients(model, inputs)
    config = RestConfig(pointwise=None, product=3, attention=None, norm=None, other=None, min_elements=64)
    sketch_(model, {"*": None}, rest=config)
    draws = [gradients(model, inputs) for _ in range(30)]
    for each in (name for name in exact if "experts" in name):
        along = torch.stack([(drawn[each] * exact[each]).sum() / exact[each].square().sum() for drawn in draws])
        assert along.std() > 0
        assert within_five_standard_errors(along, 1), (each, along.mean(), along.std())


def test_a_state_space_model_keeps_a_small_share(wide_mamba):
    assert share(wide_mamba) <= 0.22


def test_dropout_on_a_cpu_keeps_a_small_share():
    """Torch's attention is not fused there: it keeps probabilities and a mask of floating-point numbers."""
    assert share(wide_roberta, "cpu", batch=1, dropout=0.1) <= 0.17


def test_a_learned_mask_stays_as_it_is():
    """T5 adds numbers near minus infinity to its position bias; in a group with them, all others would vanish."""
    seen = []

    def observer(family, tensor, kept):
        if family == "attention" and tensor.shape[-2:] == (128, 128):
            seen.append((tensor.requires_grad, kept))

    with torch.device("meta"), meta_step(), observe_saving(observer):
        model, inputs = wide_t5()
        sketch_(model.train(), rest=True)(**inputs)
    assert (True, None) in seen
    assert {kept for _, kept in seen} == {None}


# Gradients and outputs, with few values


def small_t5():
    config = transformers.T5Config(
        vocab_size=100, d_model=64, d_kv=16, d_ff=96, num_heads=4, num_layers=1, dropout_rate=0.0, is_gated_act=True,
        dense_act_fn="gelu_new", decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), text()


def small_whisper():
    config = transformers.WhisperConfig(
        vocab_size=100, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=20, max_source_positions=32,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    inputs = text()
    features = torch.randn(len(inputs["labels"]), 20, 64)
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": features,
        "labels": inputs["labels"],
    }


def small_mamba():
    config = transformers.MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, use_cache=False)
    return transformers.MambaForCausalLM(config), {name: each[:2, :16] for name, each in text().items()}


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {
    "roberta": lambda: roberta(num_hidden_layers=1, **NO_DROPOUT),
    "gpt2": lambda: gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "llama": lambda: llama(num_hidden_layers=1),
    "t5": small_t5,
    "vit": lambda: vit(num_hidden_layers=1),
    "whisper": small_whisper,
    "mixtral": lambda: mixtral(),
    "mamba": small_mamba,
}


def gradients(model: nn.Module, inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: each.grad.double() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", SMALL)
def test_outputs_are_the_same_bit_for_bit(name):
    model, inputs = SMALL[name]()
    model.train()
    exact = model(**inputs)
    sketch_(model, rest=RestConfig(min_elements=64))
    out = model(**inputs)
    assert torch.equal(out.loss, exact.loss)
    assert torch.equal(out.logits, exact.logits)
    assert torch.equal(unsketch_(model)(**inputs).logits, exact.logits)


@pytest.mark.parametrize("name", SMALL)
def test_gradients_of_every_parameter_are_unbiased(name):
    """Activation functions, products, matrix products and masks are; attention, norms and the loss are left exact."""
    model, inputs = SMALL[name]()
    model.train()
    exact = gradients(model, inputs)
    config = RestConfig(pointwise=2, product=3, attention=None, norm=None, other=None, min_elements=64)
    sketch_(model, {"*": None}, rest=config)
    draws = [gradients(model, inputs) for _ in range(50)]
    assert draws[0].keys() == exact.keys()
    largest = max(gradient.norm() for gradient in exact.values())
    for each, gradient in exact.items():
        if gradient.norm() < 1e-6 * largest:  # zero but for rounding, as that of the bias of keys
            assert each.endswith(("key.bias", "k_proj.bias"))
            continue
        along = torch.stack([(drawn[each] * gradient).sum() / gradient.square().sum() for drawn in draws])
        assert within_five_standard_errors(along, 1), (each, along.mean(), along.std())


@pytest.mark.parametrize("name", SMALL)
def test_eight_bits_are_as_good_as_exact(name):
    model, inputs = SMALL[name]()
    model.train()
    exact = gradients(model, inputs)
    sketch_(model, {"*": None}, rest=RestConfig.of(8))
    flat = [torch.cat([each.flatten() for each in grads.values()]) for grads in (gradients(model, inputs), exact)]
    assert (flat[0] - flat[1]).square().sum() <= 1e-3 * flat[1].square().sum()

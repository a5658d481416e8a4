"""Small transformers with random weights, each with one batch."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, HIDDEN, MIDDLE = 4, 32, 64, 160
ROWS = BATCH * LENGTH
TINY = {
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": 3,
}

UNDROPPED = (
    "attention_probs_dropout_prob",
    "hidden_dropout_prob",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "summary_first_dropout",
)


def text(vocabulary=100, classes=None):
    ids = torch.randint(5, vocabulary, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids if classes is None else torch.randint(0, classes, (BATCH,))}


def roberta(**options):
    config = transformers.RobertaConfig(
        vocab_size=100, max_position_embeddings=LENGTH + 4, attn_implementation="eager", **(TINY | options)
    )
    return transformers.RobertaForSequenceClassification(config), text(classes=3)


def gpt2(**options):
    config = transformers.GPT2Config(vocab_size=100, n_positions=LENGTH, n_embd=HIDDEN, n_layer=2, n_head=4, **options)
    return transformers.GPT2LMHeadModel(config), text()


def llama(vocabulary=100, **options):
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, num_key_value_heads=4, attn_implementation="sdpa", **(TINY | options)
    )
    return transformers.LlamaForCausalLM(config), text(vocabulary)


def mixtral(**options):
    config = transformers.MixtralConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=8, **options,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), text()


def vit(**options):
    config = transformers.ViTConfig(image_size=16, patch_size=4, attn_implementation="sdpa", **(TINY | options))
    inputs = {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 3, (BATCH,))}
    return transformers.ViTForImageClassification(config), inputs


MODELS = [roberta, gpt2, llama, vit]


def without_dropout(make, **options):
    """Make a model of widths that fill groups of 128 values, as those of real models do, unless they are given."""
    model, batch = make(**options)
    for name in UNDROPPED:
        setattr(model.config, name, 0.0)
    for name, width in (("hidden_size", 128), ("n_embd", 128), ("intermediate_size", 256), ("head_dim", 32)):
        if name not in options and isinstance(model.config.__dict__.get(name), int):
            setattr(model.config, name, width)
    model.config._attn_implementation, model.config.use_cache = "sdpa", False
    return type(model)(model.config), batch

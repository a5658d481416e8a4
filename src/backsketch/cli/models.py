"""A transformers model from its config alone, with random weights or none, and a batch to train it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

HEADS = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
}
_ENDINGS = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForConditionalGeneration": "seq2seq-lm",
    "ForImageClassification": "image-classification",
}


def load_config(name: str) -> Any:
    """Return the config of a name on the hub, a directory, or a config file; no weights are read."""
    transformers.logging.set_verbosity_error()
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"model must be a directory with config.json, got {name!r}")
    if path.exists():
        return transformers.AutoConfig.from_pretrained(str(path))
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.suffix == ".json":
        raise ValueError(f"model must be a path that exists or a name on the hub, got {name!r}")
    return _from_hub(name)


def find_head(config: Any) -> str:
    """Return the head to train with: what its authors did for decoders, a classifier for encoders."""
    architecture = (config.architectures or [""])[0]
    for ending, head in _ENDINGS.items():
        if architecture.endswith(ending):
            return head
    if config.is_encoder_decoder:
        return "seq2seq-lm"
    if config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "sequence-classification"
    if config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "causal-lm"
    if config.model_type in modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "image-classification"
    raise ValueError(f"the config does not tell what a {config.model_type} model is trained for: give --head")


def build(config: Any, head: str, *, device: str, dtype: torch.dtype) -> nn.Module:
    """Return the model with random weights; on the meta device it has shapes only."""
    if head not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}, got {head!r}")
    config.use_cache = False
    if head == "sequence-classification":
        config.problem_type = "single_label_classification" if config.num_labels > 1 else "regression"
        if config.pad_token_id is None:
            config.pad_token_id = 0  # a decoder needs one to find the last token
    if head == "seq2seq-lm" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    kind = getattr(transformers, HEADS[head])
    if type(config) not in kind._model_mapping:
        raise ValueError(f"transformers has no {config.model_type} model with the head {head!r}: give another --head")
    with torch.device(device):
        model: nn.Module = kind.from_config(config)
    return model.to(dtype).train()


def make_batch(model: nn.Module, head: str, *, batch: int, seq: int, device: str) -> dict[str, Tensor]:
    """Return a batch of random tokens, or images, with labels."""
    config: Any = model.config
    with torch.device(device):
        classes = torch.zeros(batch) if getattr(config, "num_labels", 2) == 1 else torch.zeros(batch, dtype=torch.long)
        if head == "image-classification":
            size = (batch, config.num_channels, config.image_size, config.image_size)
            return {"pixel_values": torch.randn(size, dtype=next(model.parameters()).dtype), "labels": classes}
        ids = torch.randint(config.vocab_size, (batch, seq))
    return {"input_ids": ids, "labels": classes if head == "sequence-classification" else ids}


def positions(model: nn.Module) -> int | None:
    """Return how many tokens the model has positions for, or None if it has no limit."""
    limit = getattr(model.config, "max_position_embeddings", None)
    limits = [limit] if isinstance(limit, int) and limit > 0 else []
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from there
            limits.append(module.num_embeddings - unused)
    return min(limits, default=None)


def _from_hub(name: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except OSError:
        pass  # not in the cache
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except OSError as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"model must be a path that exists or a name on the hub, got {name!r}: {reason}") from error

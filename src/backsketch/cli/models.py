"""A transformers model made from its config alone, with random weights or on meta, and a batch to train it on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .audio import audio_shape, takes_length

HEADS = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "audio-classification": "AutoModelForAudioClassification",
}

_ENDINGS = {
    "ForCausalLM": ("causal-lm",),
    "LMHeadModel": ("causal-lm",),
    "ForConditionalGeneration": ("seq2seq-lm", "speech-seq2seq"),
    "ForImageClassification": ("image-classification",),
    "ForAudioClassification": ("audio-classification",),
}
_DECODERS, _ENCODERS = ("seq2seq-lm", "speech-seq2seq"), ("causal-lm", "image-classification", "audio-classification")


def load_config(name: str) -> Any:
    """Return the config behind a name on the hub, a directory, or a config file; no weights are read."""
    transformers.logging.set_verbosity_error()
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"model must be a directory with config.json, got {name!r}")
    if path.exists():
        return _from_path(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.suffix == ".json":
        raise ValueError(f"model must be a path that exists or a name on the hub, got {name!r}")
    return _from_hub(name)


def find_head(config: Any) -> str:
    """Return the head to train with: for decoders the one of the config's architecture, for encoders a classifier."""
    architecture, fitting = (config.architectures or [""])[0], fitting_heads(config)
    wanted = [head for ending, heads in _ENDINGS.items() if architecture.endswith(ending) for head in heads]
    if config.is_encoder_decoder:
        wanted += _DECODERS
    if "masked-lm" in fitting:
        wanted.append("sequence-classification")
    for head in (*wanted, *_ENCODERS):
        if head in fitting:
            return head
    if fitting:
        raise ValueError(f"the config does not tell what the model is trained for: give --head {' or '.join(fitting)}")
    raise ValueError(
        f"transformers has no {config.model_type} model with a head known here ({', '.join(HEADS)}): "
        "backsketch.profile(model, **batch) takes any model"
    )


def fitting_heads(config: Any) -> list[str]:
    """Return the heads with which transformers has a model of this config."""
    return [head for head, kind in HEADS.items() if type(config) in getattr(transformers, kind)._model_mapping]


def stated_dtype(config: Any) -> str | None:
    """Return the name of the dtype that the config states, if it does."""
    stated = config.dtype if hasattr(config, "dtype") else getattr(config, "torch_dtype", None)
    return None if stated is None else str(stated).removeprefix("torch.")


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
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)  # otherwise a step would skip random layers, and the bytes would vary
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = False  # it writes at random positions, which fails on meta
    if head not in (fitting := fitting_heads(config)):
        raise ValueError(
            f"transformers has no {config.model_type} model with the head {head!r}: --head may be "
            f"{', '.join(fitting) or 'none of those known here'}"
        )
    with torch.device(device):
        model: nn.Module = getattr(transformers, HEADS[head]).from_config(config)
    return model.to(device, dtype).train()  # some models make a parameter on the CPU whatever the device


def takes_seq(config: Any, head: str) -> bool:
    """Tell whether examples may have any length, in tokens or frames; images and some audio clips have a fixed one."""
    return head != "image-classification" and (head != "audio-classification" or takes_length(config))


def make_batch(model: nn.Module, head: str, *, batch: int, seq: int, device: str) -> dict[str, Tensor]:
    """Return a batch of random tokens, images or audio, with labels."""
    config: Any = model.config
    dtype = next(model.parameters()).dtype
    with torch.device(device):
        classes = torch.zeros(batch) if getattr(config, "num_labels", 2) == 1 else torch.zeros(batch, dtype=torch.long)
        if head == "image-classification":
            size = (batch, config.num_channels, config.image_size, config.image_size)
            return {"pixel_values": torch.randn(size, dtype=dtype), "labels": classes}
        if head in ("speech-seq2seq", "audio-classification"):
            name, shape = audio_shape(config, batch=batch, frames=seq)
            tokens = torch.randint(config.vocab_size, (batch, seq)) if head == "speech-seq2seq" else classes
            return {name: torch.randn(shape, dtype=dtype), "labels": tokens}
        ids = torch.randint(config.vocab_size, (batch, seq))
    return {"input_ids": ids, "labels": classes if head == "sequence-classification" else ids}


def batch_in_words(inputs: Mapping[str, Tensor]) -> str:
    """Describe the size of a batch: "32 × 128 tokens"."""
    name, (count, *size) = next((name, tensor.shape) for name, tensor in inputs.items() if name != "labels")
    if name == "input_ids":
        return f"{count} × {size[0]} tokens"
    if name == "pixel_values":
        return f"{count} images of {' × '.join(map(str, size[1:]))}"
    tokens = f", with {inputs['labels'].shape[1]} tokens each" if inputs["labels"].dim() == 2 else ""
    unit = "samples" if len(size) == 1 else "values"
    return f"{count} clips of {' × '.join(map(str, size))} {unit}{tokens}"


def _from_path(path: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"model must be a directory or a file with a config, got {str(path)!r}: {reason}") from error


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

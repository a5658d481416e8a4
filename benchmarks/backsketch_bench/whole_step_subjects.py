"""Models whose whole steps are compared: of RoBERTa-base's and of SmolLM2-135M's shapes, with random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

RANK = 16  # of the adapters of LoRA
_WORDS = 1000  # the vocabulary stays apart: its table and its logits would hide what blocks keep


@dataclass(frozen=True)
class Training:
    """A model, its optimizer and its loss; ``step`` is a training step of the model as it is when called."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[], Tensor]

    def step(self) -> None:
        """Run forward, backward and the optimizer."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Subject:
    """A kind of model with the batch it is trained on.

    Attributes:
        blocks: how many the real model has.
        build: makes a model of some blocks for texts of some length.
        loss: of a model and a batch of words, (batch, length) -> ().
    """

    title: str
    blocks: int
    batch: int
    length: int
    build: Callable[[int, int], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]

    def training(self, blocks: int, dtype: torch.dtype, quick: bool) -> Training:
        """Return a model that trains all of its weights."""
        return self._training(self.build(blocks, self.length).to(dtype).train(), quick)

    def with_adapters(self, training: Training, quick: bool) -> Training:
        """Return a copy of a model that trains adapters of LoRA on all linear layers."""
        from peft import LoraConfig, get_peft_model

        own: Any = copy.deepcopy(training.model)
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
        return self._training(get_peft_model(own, config, autocast_adapter_dtype=False), quick)

    def words(self, quick: bool) -> tuple[int, int]:
        """Return the shape of a batch."""
        return (self.batch // 4, self.length // 4) if quick else (self.batch, self.length)

    def _training(self, model: nn.Module, quick: bool) -> Training:
        words = torch.randint(5, _WORDS, self.words(quick))
        optimizer = AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-5, fused=True)
        return Training(model, optimizer, lambda: self.loss(model, words))


def _encoder(blocks: int, length: int, dropout: float = 0.0) -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        num_hidden_layers=blocks,
        vocab_size=_WORDS,
        max_position_embeddings=length + 2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    config._attn_implementation, config.use_cache = "sdpa", False
    return RobertaForSequenceClassification(config)


def _encoder_with_dropout(blocks: int, length: int) -> nn.Module:
    return _encoder(blocks, length, dropout=0.1)


def _class_loss(model: nn.Module, words: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=words, labels=words[:, 0] % 2).loss
    return loss


def _language_model(blocks: int, length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=blocks,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=_WORDS,
        max_position_embeddings=length,
    )
    config._attn_implementation, config.use_cache = "sdpa", False
    return LlamaModel(config)


def _mean(model: nn.Module, words: Tensor) -> Tensor:
    """Return a loss that keeps nothing for its own backward."""
    mean: Tensor = model(input_ids=words).last_hidden_state.mean()
    return mean


SUBJECTS = {
    "encoder": Subject("RoBERTa-base", 12, 32, 128, _encoder, _class_loss),
    "dropout": Subject("RoBERTa-base, dropout 0.1", 12, 32, 128, _encoder_with_dropout, _class_loss),
    "language-model": Subject("SmolLM2-135M without logits", 30, 4, 512, _language_model, _mean),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

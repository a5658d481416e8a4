"""The steps that are counted: of one linear layer and of one block of a transformer, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from backsketch.memory.meta_device import meta_step

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is counted: its name, and how to make the module and the function that runs it on a hidden state."""

    name: str
    make: Callable[[torch.dtype], tuple[nn.Module, Tensor, Callable[[nn.Module, Tensor], Tensor]]]


def step_of(module: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Step:
    """Return forward and backward of a module whose input wants a gradient too."""

    def step() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        with meta_step():
            out = run(module, x)
        out.backward(torch.empty_like(out))

    return step


def _layer(
    rows: int, features: int, outputs: int, dtype: torch.dtype
) -> tuple[nn.Module, Tensor, Callable[[nn.Module, Tensor], Tensor]]:
    module = nn.Sequential(nn.Linear(features, outputs, device="meta", dtype=dtype))
    x = torch.empty(rows, features, device="meta", dtype=dtype, requires_grad=True)
    return module, x, lambda own, given: own(given)


def _encoder_block(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Callable[[nn.Module, Tensor], Tensor]]:
    from transformers import RobertaConfig
    from transformers.models.roberta.modeling_roberta import RobertaLayer

    config = RobertaConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa")
    with torch.device("meta"):
        module = RobertaLayer(config).to(dtype).train()
    x = torch.empty(32, 128, config.hidden_size, device="meta", dtype=dtype, requires_grad=True)
    return module, x, lambda own, given: _first(own(given))


def _llama_block(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Callable[[nn.Module, Tensor], Tensor]]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        attn_implementation="sdpa",
        use_cache=False,
    )
    batch, length = 4, 1024
    with torch.device("meta"):
        module = LlamaDecoderLayer(config, 0).to(dtype).train()
        turns = torch.empty(1, length, config.hidden_size // config.num_attention_heads, dtype=dtype)
    x = torch.empty(batch, length, config.hidden_size, device="meta", dtype=dtype, requires_grad=True)
    return module, x, lambda own, given: _first(own(given, position_embeddings=(turns, turns)))


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


SHAPES = ((4096, 768, 3072), (4096, 3072, 768), (65536, 1024, 1024))
SUBJECTS = [
    *(
        Subject(f"{rows} x {features} -> {outputs}", partial(_layer, rows, features, outputs))
        for rows, features, outputs in SHAPES
    ),
    Subject("encoder block, 4096 x 768", _encoder_block),
    Subject("Llama block, 4096 x 2048", _llama_block),
]

"""Why sketch_ leaves a layer exact though its config says otherwise: it would keep much, save nothing, or never run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..config import SketchConfig
from ..linear.keeping import kept_bytes

FROZEN = "frozen: keeps nothing"
FUSED_LOSS = "its loss is fused: its input is kept once, as it is, and no logits are"
NEVER_CALLED = "its weight is read and it is never called"

_MOST = 0.5  # of an input's bytes: a sketch that keeps more is hardly worth its noise
_WIDE, _MANY_ROWS = 4096, 1 << 20  # large sizes, at which the overhead of ranges and seed is smallest


def narrow_reason(module: nn.Module, config: SketchConfig) -> str | None:
    """Return why a layer is too narrow for ``config``, or None if it is wide enough or a wide one would keep as much.

    Rows in few bits have 4 bytes of ranges for each group of values, also for a group of one.
    """
    features, dtype = in_features(module), weight_of(module).dtype
    share = _kept_share(config, features, dtype.itemsize)
    if share <= _MOST or share <= 1.1 * _kept_share(config, _WIDE, dtype.itemsize):
        return None
    named = str(dtype).removeprefix("torch.")
    return f"narrow: of {_counted(features)} in {named} it would keep {share:.0%} of the bytes"


def lora_b_reason(module: nn.Module) -> str:
    """Say why a lora_B stays exact under a config that is meant for all layers."""
    return f"lora_B reads only {_counted(in_features(module))}: little to save, so only a pattern selects it"


def lora_b_layers(model: nn.Module) -> set[nn.Module]:
    """Return the layers of ``model`` that are the lora_B of a LoRA adapter."""
    return {layer for adapter in _lora_adapters(model) for layer in _layers(adapter.lora_B)}


def uncalled_layers(model: nn.Module) -> set[nn.Module]:
    """Return the lora_A and lora_B of adapters that merge them into a weight without calling them."""
    if "peft.tuners.lora.layer" not in sys.modules:
        return set()
    from peft.tuners.lora import layer as lora

    kinds = tuple(getattr(lora, name) for name in ("ParamWrapper", "MultiheadAttention") if hasattr(lora, name))
    uncalled = nn.modules.linear.NonDynamicallyQuantizableLinear  # the output layer of nn.MultiheadAttention
    adapters = [
        adapter
        for adapter in _lora_adapters(model)
        if isinstance(adapter, kinds) or isinstance(adapter.base_layer, uncalled)
    ]
    return {layer for adapter in adapters for held in (adapter.lora_A, adapter.lora_B) for layer in _layers(held)}


def in_features(module: nn.Module) -> int:
    """Return how many features a row of a convertible layer's input has."""
    return module.in_features if isinstance(module, nn.Linear) else len(weight_of(module))


def _kept_share(config: SketchConfig, features: int, itemsize: int) -> float:
    """Return which share of the bytes of an input of many rows ``config`` keeps."""
    size = _MANY_ROWS * features * itemsize
    return kept_bytes(config, _MANY_ROWS, features, itemsize) / size if size else 0.0


def weight_of(module: nn.Module) -> Tensor:
    """Return a layer's weight."""
    weight: Any = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _lora_adapters(model: nn.Module) -> Iterator[Any]:
    """Yield the modules of ``model`` that are LoRA adapters of PEFT: there are none where nobody imported it."""
    if "peft.tuners.lora" not in sys.modules:
        return
    from peft.tuners.lora import LoraLayer

    yield from (module for module in model.modules() if isinstance(module, LoraLayer))


def _layers(held: object) -> list[nn.Module]:
    """Return the layers that an adapter holds under one name; AdaLoRA holds parameters there, which are none."""
    return list(held.values()) if isinstance(held, nn.ModuleDict) else []


def _counted(features: int) -> str:
    return "1 feature" if features == 1 else f"{features} features"

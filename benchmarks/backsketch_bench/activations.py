"""Real inputs and output gradients of every linear layer of a model, for one batch of its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .progress import progress

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Activation:
    """The tensors of one linear layer: its input x, y = ∂L/∂X̂, and which rows are tokens, not padding.

    ``valid`` is None for a layer that does not see every token, such as a pooler or a classifier.
    """

    name: str
    x: Tensor
    y: Tensor
    valid: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model, how to draw a batch for it, how to get its loss, and what to say of it in a record.

    ``left_out`` names linear layers that are not measured.
    """

    model: nn.Module
    draw: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    settings: Mapping[str, Any]
    steps: int
    learning_rate: float
    left_out: tuple[str, ...] = ()


def collect(subject: Subject, draws: int = 9, dtype: torch.dtype = torch.float32) -> list[Activation]:
    """Run one forward and one backward and return the tensors of every linear layer, in the order of their calls.

    The batch is the one with the median padding of ``draws``, because single batches differ a lot in it. The model is
    cast to ``dtype`` first, and stays so.
    """
    subject.model.to(dtype)
    calls: list[tuple[str, Tensor, list[Tensor]]] = []

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            gradients: list[Tensor] = []
            output.register_hook(lambda gradient: gradients.append(gradient.detach().clone()))
            calls.append((name, args[0].detach().clone(), gradients))

        return hook

    linear = {name: module for name, module in subject.model.named_modules() if isinstance(module, nn.Linear)}
    measured = [name for name in linear if name not in subject.left_out]
    handles = [linear[name].register_forward_hook(watch(name)) for name in measured]
    batches = sorted((subject.draw() for _ in range(draws)), key=lambda batch: _valid_share(batch["attention_mask"]))
    batch = batches[draws // 2]
    try:
        subject.loss(subject.model, batch).backward()
    finally:
        for handle in handles:
            handle.remove()
        subject.model.zero_grad()
    mask = batch["attention_mask"]
    return [
        Activation(name, x, gradients[0], mask.bool() if x.shape[:-1] == mask.shape else None)
        for name, x, gradients in calls
        if gradients
    ]


def _valid_share(mask: Tensor) -> float:
    return float(mask.double().mean())


def token_layers(activations: Sequence[Activation]) -> list[Activation]:
    """Return the layers that see every token: those of the encoder or decoder."""
    return [activation for activation in activations if activation.valid is not None]


def train(subject: Subject) -> float:
    """Train for ``subject.steps`` steps with AdamW, show progress, and return the last loss."""
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=subject.learning_rate)
    subject.model.train()
    last = float("nan")
    with progress() as display:
        task = display.add_task("training", total=subject.steps)
        for _ in range(subject.steps):
            loss = subject.loss(subject.model, subject.draw())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            last = loss.item()
            display.update(task, advance=1, description=f"training, loss {last:.3f}")
    return last

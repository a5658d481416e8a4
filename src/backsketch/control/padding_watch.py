"""PaddingWatch: the share of rows that count in each call of a layer, without waiting for a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..linear.graph_node import sketch_node
from ..linear.inputs import input_of
from ..torch_private import is_fake

_MOST_WAITING = 4096  # calls whose counts may stay on the device


class PaddingWatch:
    """Call ``heard(name, share)`` for each call of a layer that trains, at the latest when ``settle`` is called.

    Layers that share a mask count it once. Beside steps that are measured, all others are heard: they cost one sum of
    a mask, and the batch with the least padding is seldom one of a few.
    """

    def __init__(self, layers: Mapping[str, nn.Module], heard: Callable[[str, float], object]) -> None:
        self._heard = heard
        self._waiting: list[tuple[str, int, Tensor | None]] = []
        self._mask: tuple[ref[Tensor], Tensor] | None = None  # the last one, and how many rows count
        self._handles: list[RemovableHandle] = [
            layer.register_forward_hook(partial(self._called, name), prepend=True, with_kwargs=True)
            for name, layer in layers.items()
        ]

    def settle(self) -> None:
        """Fetch the counts that wait, all of a device at once."""
        waiting, self._waiting, self._mask = self._waiting, [], None
        counts: dict[int, Tensor] = {id(count): count for _, _, count in waiting if count is not None}
        by_device: dict[torch.device, list[Tensor]] = {}
        for each in counts.values():
            by_device.setdefault(each.device, []).append(each)
        known: dict[int, float] = {}
        for own in by_device.values():
            known.update(zip(map(id, own), torch.stack(own).tolist(), strict=True))
        for name, rows, count in waiting:
            self._heard(name, 1.0 if count is None else known[id(count)] / rows)

    def stop(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._waiting, self._mask = [], None

    @torch.no_grad()
    def _called(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if torch.compiler.is_compiling() or (node := sketch_node(output)) is None:
            return
        x = input_of(args, kwargs)
        rows = x.shape[:-1].numel()
        if not rows or x.is_meta or is_fake(x):
            return
        self._waiting.append((name, rows, None if node.valid is None else self._counted(node.valid)))
        if len(self._waiting) >= _MOST_WAITING:
            self.settle()

    def _counted(self, valid: Tensor) -> Tensor:
        if self._mask is None or self._mask[0]() is not valid:
            self._mask = ref(valid), valid.sum()
        return self._mask[1]

"""SharedInputs: which layers read one tensor, and so keep it once between them under one config."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..linear.inputs import input_of
from ..linear.sharing import identity


class SharedInputs:
    """Watch the calls of layers and group those that read the same tensor with the same config."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._leader = {name: name for name in layers}
        self._readers: dict[Hashable, tuple[ref[torch.UntypedStorage], str]] = {}
        self._handles: list[RemovableHandle] = [
            layer.register_forward_pre_hook(partial(self._called, name), with_kwargs=True)
            for name, layer in layers.items()
        ]

    def groups(self) -> list[tuple[str, ...]]:
        """Return the layers seen so far in groups, in the order of the model."""
        groups: dict[str, list[str]] = {}
        for name in self._leader:
            groups.setdefault(self._first(name), []).append(name)
        return [tuple(names) for names in groups.values()]

    def stop(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._readers.clear()

    def _called(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        x = input_of(args, kwargs)
        storage, key = x.untyped_storage(), (identity(x), layer.config)
        known = self._readers.get(key)
        if known is not None and known[0]() is storage:  # not one that took the place of another
            self._leader[self._first(name)] = self._first(known[1])
        else:
            self._readers[key] = ref(storage), name

    def _first(self, name: str) -> str:
        while self._leader[name] != name:
            name = self._leader[name]
        return name

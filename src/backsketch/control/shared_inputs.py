"""SharedInputs: which layers read one tensor, and so keep it once between them under one config."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..config import check_config
from ..convert.layer_classes import is_sketched
from ..linear.inputs import input_of
from ..linear.sharing import identity


class SharedInputs:
    """Watch the calls of layers and group those that read the same tensor, in the steps that ``watching`` chooses.

    Layers are kept apart if their configs differ in more than the ratio and the number of bits.
    """

    def __init__(self, layers: Mapping[str, nn.Module], watching: Callable[[], bool]) -> None:
        self._watching = watching
        self._leader = {name: name for name in layers}
        self._order = {name: index for index, name in enumerate(layers)}
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

    def leaders(self) -> list[int]:
        """Return for each layer the number of the first one of its group."""
        return [self._order[self._first(name)] for name in self._leader]

    def follow(self, leaders: Sequence[int]) -> None:
        """Also group what others, which watch the same layers, have seen to belong together."""
        for name, leader in zip(self._leader, list(leaders), strict=True):
            self._join(name, list(self._order)[leader])

    def unite(self, groups: Iterable[Sequence[str]]) -> None:
        """Also group what an earlier run has seen to belong together."""
        for first, *others in groups:
            for name in others:
                self._join(name, first)

    def end_step(self) -> None:
        """Forget the inputs of a step."""
        self._readers.clear()

    def stop(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._readers.clear()

    def _called(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not is_sketched(layer) or not self._watching():
            return
        x = input_of(args, kwargs)
        storage, key = x.untyped_storage(), (identity(x), replace(check_config(layer.config), ratio=1.0, bits=8))
        known = self._readers.get(key)
        if known is not None and known[0]() is storage:  # not one that took the place of another
            self._join(name, known[1])
        else:
            self._readers[key] = ref(storage), name

    def _join(self, one: str, other: str) -> None:
        first, second = sorted((self._first(one), self._first(other)), key=self._order.__getitem__)
        self._leader[second] = first

    def _first(self, name: str) -> str:
        while self._leader[name] != name:
            name = self._leader[name]
        return name

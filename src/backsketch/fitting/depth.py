"""Few blocks for many: a model whose blocks are alike is run with a few of them, and the log of one stands for all."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def with_few_blocks(model: Model, blocks: Sequence[str], count: int) -> Model | None:
    """Return a copy of a model with the first ``count`` of its blocks, or None if one block cannot stand for another.

    It can if all blocks are members of one list, in order, and alike: of the same classes, shapes and settings.
    """
    parents = {name.rpartition(".")[0] for name in blocks}
    if len(blocks) <= count or len(parents) != 1:
        return None
    path = parents.pop()
    container = model.get_submodule(path)
    if [f"{path}.{part}" if path else part for part, _ in container.named_children()] != list(blocks):
        return None
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):
        return None
    first = model.get_submodule(blocks[0])
    if not all(_alike(first, model.get_submodule(name), index) for index, name in enumerate(blocks) if index):
        return None
    unused = {id(model.get_submodule(name)): nn.Module() for name in blocks[count:]}  # not copied, as they go anyway
    few = copy.deepcopy(model, unused)
    shorter = few.get_submodule(path)
    assert isinstance(shorter, (nn.ModuleList, nn.Sequential))
    del shorter[count:]
    return few


def _alike(first: nn.Module, other: nn.Module, index: int) -> bool:
    for one, two in zip_all(first.named_modules(), other.named_modules()):
        if one is None or two is None or one[0] != two[0] or type(one[1]) is not type(two[1]):
            return False
        if not _same_settings(vars(one[1]), vars(two[1]), index):
            return False
    return all(
        one is not None
        and two is not None
        and (one.shape, one.dtype, one.requires_grad) == (two.shape, two.dtype, two.requires_grad)
        for one, two in zip_all(
            (*first.parameters(), *first.buffers()),
            (*other.parameters(), *other.buffers()),
        )
    )


def _same_settings(one: dict[str, Any], two: dict[str, Any], index: int) -> bool:
    """Tell whether the plain attributes of two modules agree, apart from the number of the block."""
    if one.keys() != two.keys():
        return False
    numbers = (0, index)
    return all(
        one[name] == two[name] or (one[name], two[name]) == numbers for name in one if isinstance(one[name], _PLAIN)
    )


def zip_all(one: Any, two: Any) -> Iterator[tuple[Any, Any]]:
    """Pair the members of two collections; where one is longer, the other gives None."""
    firsts, seconds = list(one), list(two)
    length = max(len(firsts), len(seconds))
    yield from zip(
        [*firsts, *[None] * (length - len(firsts))], [*seconds, *[None] * (length - len(seconds))], strict=True
    )


_PLAIN = (bool, int, float, str, tuple, type(None), torch.dtype)

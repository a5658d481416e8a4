"""reach: how many of a model's trained weights are in sketched layers, and which of the others are out of reach."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from ..table import starred, starred_names
from ..tensor_storages import sizes
from .layer_classes import is_sketched
from .why_exact import EMBEDDINGS, why_unreached


@dataclass(frozen=True, slots=True)
class Unreached:
    """Trained weights of two or more dimensions in no sketched layer, together for modules alike in all blocks.

    Attributes:
        modules: their names; type: their class; parameter, shape: the weight in each of them.
        elements, share: how many weights that is in all, and of all that train; reason: why no sketch reaches them.
    """

    modules: tuple[str, ...]
    type: str
    parameter: str
    shape: tuple[int, ...]
    elements: int
    share: float
    reason: str

    @property
    def name(self) -> str:
        """Return the weight's whole name, with * for the numbers that differ."""
        module = self.modules[0] if len(self.modules) == 1 else starred(self.modules[0])
        return f"{module}.{self.parameter}" if module else self.parameter


@dataclass(frozen=True, slots=True)
class Reach:
    """How many weights train, which share is in sketched layers and in embeddings, and what else is not reached."""

    trained: int
    reached: float
    embeddings: float
    unreached: tuple[Unreached, ...]


def reach(model: nn.Module) -> Reach:
    """Count the weights of ``model`` that train, a tied one once: for a sketched layer, else for no embedding."""
    owned = list(_owned_parameters(model))
    owned.sort(key=lambda each: (not is_sketched(each.module), isinstance(each.module, EMBEDDINGS)))
    weights = list({_identity(each.parameter): each for each in reversed(owned)}.values())[::-1]
    total = sum(each.parameter.numel() for each in weights)
    exact = [each for each in weights if not is_sketched(each.module)]
    embeddings = sum(each.parameter.numel() for each in exact if isinstance(each.module, EMBEDDINGS))
    untouched = sum(each.parameter.numel() for each in exact)
    return Reach(
        trained=total,
        reached=(total - untouched) / max(total, 1),
        embeddings=embeddings / max(total, 1),
        unreached=_grouped([each for each in exact if each.parameter.dim() > 1], total),
    )


@dataclass(frozen=True, slots=True)
class _Owned:
    """A parameter of a module, by name."""

    path: str
    module: nn.Module
    name: str
    parameter: Tensor


def _owned_parameters(model: nn.Module) -> Iterator[_Owned]:
    """Yield the parameters that train with every module that holds them; what a weight is computed from is its own."""
    for path, module in model.named_modules():
        own = list(module.named_parameters(recurse=False))
        if parametrize.is_parametrized(module):
            own += module.get_submodule("parametrizations").named_parameters(prefix="parametrizations")
        for name, parameter in own:
            if parameter.requires_grad and not isinstance(parameter, UninitializedParameter):
                yield _Owned(path, module, name, parameter)


def _identity(parameter: Tensor) -> Hashable:
    """Return what two parameters have in common only if they are the same values in memory."""
    return tuple(sizes([parameter])), parameter.storage_offset(), parameter.numel()


def _grouped(weights: list[_Owned], total: int) -> tuple[Unreached, ...]:
    groups: dict[Hashable, list[_Owned]] = {}
    for each in weights:
        reason = starred_names(why_unreached(each.module, each.parameter))
        key = starred(each.path), type(each.module), each.name, each.parameter.shape, reason
        groups.setdefault(key, []).append(each)
    found = []
    for group in groups.values():
        first, elements = group[0], sum(each.parameter.numel() for each in group)
        reason = why_unreached(first.module, first.parameter)
        found.append(
            Unreached(
                modules=tuple(each.path for each in group),
                type=type(first.module).__name__,
                parameter=first.name,
                shape=tuple(first.parameter.shape),
                elements=elements,
                share=elements / total,
                reason=reason if len(group) == 1 else starred_names(reason),
            )
        )
    return tuple(sorted(found, key=lambda each: -each.elements))

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
from .summary_reasons import EMBEDDINGS, why_unreached


@dataclass(frozen=True, slots=True)
class Unreached:
    """A trained weight matrix that is in no sketched layer, together with its counterparts in other blocks.

    Attributes:
        modules: the modules that have it, by name; type: their class.
        parameter, shape: its name and its shape in each of them.
        elements: how many weights it has in all modules; share: the same, relative to all trained weights.
        reason: why no sketch reaches it.
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
        """Return the weight's full name, with * for the numbers of blocks."""
        module = self.modules[0] if len(self.modules) == 1 else starred(self.modules[0])
        return f"{module}.{self.parameter}" if module else self.parameter


@dataclass(frozen=True, slots=True)
class Reach:
    """How many weights train, their shares in sketched layers and in embeddings, and what no sketch reaches."""

    trained: int
    reached: float
    embeddings: float
    unreached: tuple[Unreached, ...]


def reach(model: nn.Module, *, packed: bool = False) -> Reach:
    """Count the weights of ``model`` that train; ``packed`` tells that ``rest`` is on.

    A weight that several modules share counts once: for a sketched layer if it is in one, and for an embedding only if
    it is in no other module.
    """
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
        unreached=_grouped([each for each in exact if each.parameter.dim() > 1], total, packed),
    )


@dataclass(frozen=True, slots=True)
class _Owned:
    """A parameter and the module that has it: ``path`` names the module, ``name`` the parameter."""

    path: str
    module: nn.Module
    name: str
    parameter: Tensor


def _owned_parameters(model: nn.Module) -> Iterator[_Owned]:
    """Yield every trained parameter, once for each module that has it.

    A parametrized weight is computed from other parameters, which count as parameters of its module.
    """
    for path, module in model.named_modules():
        own = list(module.named_parameters(recurse=False))
        if parametrize.is_parametrized(module):
            own += module.get_submodule("parametrizations").named_parameters(prefix="parametrizations")
        for name, parameter in own:
            if parameter.requires_grad and not isinstance(parameter, UninitializedParameter):
                yield _Owned(path, module, name, parameter)


def _identity(parameter: Tensor) -> Hashable:
    """Return a key that is equal only for parameters that use the same memory."""
    return tuple(sizes([parameter])), parameter.storage_offset(), parameter.numel()


def _grouped(weights: list[_Owned], total: int, packed: bool) -> tuple[Unreached, ...]:
    groups: dict[Hashable, list[_Owned]] = {}
    for each in weights:
        reason = starred_names(why_unreached(each.module, each.parameter, packed=packed))
        key = starred(each.path), type(each.module), each.name, each.parameter.shape, reason
        groups.setdefault(key, []).append(each)
    found = []
    for group in groups.values():
        first, elements = group[0], sum(each.parameter.numel() for each in group)
        reason = why_unreached(first.module, first.parameter, packed=packed)
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

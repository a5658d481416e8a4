"""Rules: how an operation keeps what it saves for backward. Each rule is a value, called in place of the operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..storage.packed_copies import packed_copy
from ..torch_private import producer_of, saves_its_output, tree_leaves
from .origins import is_of_experts, is_weight, may_depend_on, origin, same_memory
from .packed_flags import PackedFlags
from .saving import Keep, Kept, SavingStep, is_plain

PRECISE = 8  # bits: as precise as bf16
# An operand so many times smaller than another one stays as it is: it costs no more than that one in 4 bits.
_BROADCAST = 8


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function of torch, in a step that keeps what it saves."""

    step: SavingStep
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument, given by its position or by its name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def options(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return all arguments but the first, which may be given as ``input``."""
        return self.args[1:], {name: value for name, value in self.kwargs.items() if name != "input"}

    def operands(self) -> list[Tensor]:
        """List the tensors among the arguments, also those in lists."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def covers(self, x: Any) -> bool:
        """Tell whether ``x`` is an activation that is large enough to be kept in few bits."""
        return is_plain(x) and is_activation(x) and x.numel() >= self.step.config.min_elements

    def keeping(self, family: str, keep: Keep) -> Any:
        """Run it, and let ``keep`` decide how each saved tensor is kept."""
        return self.step.run(family, keep, self.function, self.args, self.kwargs)

    def replaced_by(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run another function in its place, which packs what it saves by itself."""
        return self.step.run(None, None, function, args, {})

    def as_it_is(self) -> Any:
        """Run it, and keep what it saves as it is."""
        return self.function(*self.args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class Rule(ABC):
    """Runs a call so that what it saves is kept in few bits, under the name of a family."""

    @abstractmethod
    def __call__(self, call: Call) -> Any:
        """Return what the call returns."""


@dataclass(frozen=True, slots=True)
class FewBits(Rule):
    """Keep in the bits of a family whatever activations an operation saves.

    Masks take one bit. What needs no gradient stays as it is: attention masks, tables of positions, statistics. So
    does, of an ``elementwise`` operation, an operand that is broadcast to a much larger one.

    An operand from which another one was computed, as in x · (x · x), gets a copy of its own: backward multiplies by
    both, and the product of two rounded values is unbiased only if their errors are independent.

    ``rotated`` is for operands that are contracted along their rows in memory.
    """

    family: str
    elementwise: bool = False
    rotated: bool = False

    def __call__(self, call: Call) -> Any:
        bits = getattr(call.step.config, self.family)
        largest = max((each.numel() for each in call.operands()), default=0) if self.elementwise else 0

        def keep(tensor: Tensor) -> Kept | None:
            if tensor.dtype == torch.bool:
                return PackedFlags.of_mask(tensor)
            if not is_activation(tensor) or is_broadcast(tensor, largest):
                return None
            shared = not twice_on_a_path(tensor, bits, call)
            return call.step.few_bits(tensor, bits, rotated=self.rotated, shared=shared)

        return call.keeping(self.family if self.elementwise else _family_of(call, self.family, whole=True), keep)


def twice_on_a_path(tensor: Tensor, bits: int | None, call: Call) -> bool:
    """Tell whether backward may multiply by a copy of ``tensor`` that is there already, and by what a call keeps now.

    It does for an operand that was computed from ``tensor``; in a product of three operands, two of them the same; and
    in a product of ``tensor`` with itself, if the operation that made it multiplies by it too, as exp does.
    """
    if bits is None or (copy := packed_copy(tensor, bits)) is None or copy.memory.bits >= PRECISE:
        return False
    operands = call.operands()
    others = [each for each in operands if not (is_plain(each) and same_memory(each, tensor))]
    if len(operands) - len(others) > 1 and (len(operands) > 2 or saves_its_output(producer_of(tensor))):
        return True
    return may_depend_on(others, tensor)


@dataclass(frozen=True, slots=True)
class InputOfWeight(Rule):
    """Keep the input of an operation that contracts it with a weight in few rotated bits, and nothing of the weight."""

    position: int = 0
    name: str = "input"

    def __call__(self, call: Call) -> Any:
        x = call.argument(self.position, self.name)
        source = origin(x) if isinstance(x, Tensor) else None

        def keep(tensor: Tensor) -> Kept | None:
            if origin(tensor) is not source or is_weight(tensor) or not tensor.is_floating_point():
                return None
            bits = call.step.config.product
            alone = twice_on_a_path(tensor, bits, call)
            return call.step.few_bits(tensor, bits, rotated=True, shared=not alone)

        return call.keeping(_family_of(call, "product"), keep)


def _family_of(call: Call, family: str, *, whole: bool = False) -> str:
    """Return the name under which a product is counted: apart, if it is with the weights of experts.

    Only where ``whole`` says so may these be a parameter as it is: a convolution has such a one too.
    """
    if family != "product":
        return family
    weights = (each for each in call.operands() if each.requires_grad)
    return "experts" if any((whole or each.grad_fn is not None) and is_of_experts(each) for each in weights) else family


@dataclass(frozen=True, slots=True)
class Masks(Rule):
    """Keep the masks of an operation in one bit a value, and all else as it is."""

    def __call__(self, call: Call) -> Any:
        def keep(tensor: Tensor) -> Kept | None:
            return PackedFlags.of_mask(tensor) if tensor.dtype == torch.bool else None

        return call.keeping("mask", keep)


def is_activation(tensor: Tensor) -> bool:
    """Tell whether a tensor is floating-point, depends on something that trains, and is no weight."""
    return tensor.requires_grad and tensor.is_floating_point() and not is_weight(tensor)


def is_broadcast(tensor: Tensor, largest: int) -> bool:
    """Tell whether an operand is broadcast to a much larger one of so many values."""
    return tensor.numel() * _BROADCAST <= largest

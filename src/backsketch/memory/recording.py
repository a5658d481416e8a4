"""record_ledger: run the exact model forward once and write down what autograd keeps, and for whom."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..convert.twins import sketched_type
from ..linear.held_inputs import held_by_producer
from ..linear.inputs import input_of
from ..linear.sharing import identity
from ..masks.scopes import masked_rows
from ..tensor_storages import model_tensors, sizes
from .ledger import Call, Ledger
from .running_module import RunningModule
from .saved import saved_memory


def record_ledger(model: nn.Module, forward: Callable[[], Tensor]) -> Ledger:
    """Call ``forward``, which runs ``model`` to a loss, and return what is then kept for backward."""
    running = _RunningLayer(model)
    with running, saved_memory(model, note=lambda: running.call or running.name) as saved:
        loss = forward()
    own = sizes(model_tensors(model))
    others: dict[int, dict[str, None]] = {}
    for held, note in saved.notes:
        for key in sizes(held.tensors):
            if isinstance(note, _OpenCall):
                note.add(key, held.tensors[0])
                if key in own:
                    others.setdefault(key, {})["the model's own parameters"] = None
            elif key not in own:
                others.setdefault(key, {})["the loss" if note is None else note or "the model itself"] = None
    tensors = (tensor for held, _ in saved.notes for tensor in held.tensors)
    kept = {key: size for key, size in sizes(tensors).items() if key not in own}
    calls = tuple(call.close() for call in running.calls if call.storages)
    del loss  # only now: until here it owns the graph, which owns everything counted above
    return Ledger(kept, {key: tuple(names) for key, names in others.items()}, calls)


@dataclass(eq=False, slots=True)
class _OpenCall:
    """A call of a layer whose weight trains. It owns its input, lest another tensor take its address meanwhile."""

    layer: str
    module: nn.Module
    x: Tensor
    source: Hashable
    mask: Tensor | None
    held: bool
    storages: set[int] = field(default_factory=set)
    itemsize: int = 0

    def add(self, key: int, tensor: Tensor) -> None:
        """Take note that autograd holds ``tensor`` because of this call, unless it is the layer's own weight."""
        if key not in sizes(self.module.parameters()):
            self.storages.add(key)
            self.itemsize = tensor.element_size()

    def close(self) -> Call:
        """Return the call as a record that holds no tensor."""
        shape, held = self.x.shape, frozenset(self.storages)
        mask = None if self.mask is None else tuple(sizes([self.mask]))
        return Call(self.layer, self.source, held, shape[:-1].numel(), shape[-1], self.itemsize, mask, self.held)


class _RunningLayer(RunningModule):
    """Knows the running call too, while a linear layer whose weight trains runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls: list[_OpenCall] = []
        self.call: _OpenCall | None = None

    def entered(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().entered(name, module, args, kwargs)
        if sketched_type(module) is not None and module.weight.requires_grad:
            x = input_of(args, kwargs)
            self.call = _OpenCall(name, module, x.detach(), identity(x), masked_rows(x), held_by_producer(x))
            self.calls.append(self.call)

    def left(self) -> None:
        super().left()
        self.call = None

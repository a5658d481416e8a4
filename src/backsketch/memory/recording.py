"""record_ledger: run the exact model forward once and write down what autograd keeps, and for whom."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..convert.layer_classes import sketched_type
from ..linear.held_inputs import held_by_producer
from ..linear.inputs import input_of
from ..linear.sharing import identity
from ..masks.scopes import masked_rows
from ..tensor_storages import model_tensors, sizes
from .claims import Claim, LinearClaim
from .ledger import Ledger
from .operations import operations_behind
from .running_module import RunningModule
from .saved import saved_memory
from .saved_tensor_meter import Held


def record_ledger(model: nn.Module, forward: Callable[[], Tensor]) -> Ledger:
    """Call ``forward``, which runs ``model`` to a loss, and return what is then kept for backward."""
    running = _RunningLayer(model)
    with running, saved_memory(model, note=lambda: running.call or running.name) as saved:
        loss = forward()  # it owns the graph, and so everything that is held
    own = sizes(model_tensors(model)).keys()
    operations = operations_behind(loss)
    claims = [_claim(held, operations.get(held, ""), note, own) for held, note in saved.notes]
    calls = [call.close() for call in running.calls]
    kept = sizes(tensor for held, _ in saved.notes for tensor in held.tensors)
    return Ledger(
        {key: size for key, size in kept.items() if key not in own},
        tuple(claim for claim in (*claims, *calls) if claim.storages),
    )


def _claim(held: Held, operation: str, note: _OpenCall | str | None, own: AbstractSet[int]) -> Claim:
    """Return whose claim a saved tensor is, beside those of linear layers, which take note of theirs."""
    kept = sizes(held.tensors).keys()
    claim = Claim(
        holder=_holder(note),
        operation=operation,
        shape=held.shape,
        dtype=held.dtype,
        storages=frozenset(kept - own),
        replaced=held.replaced,
    )
    if not isinstance(note, _OpenCall) or held.replaced:
        return claim
    inputs = frozenset(kept - sizes(note.module.parameters()).keys())
    note.claims.append(replace(claim, storages=inputs))
    return replace(claim, holder="the model's own parameters", storages=inputs & own)


def _holder(note: _OpenCall | str | None) -> str:
    if note is None:
        return "the loss"
    return (note.layer if isinstance(note, _OpenCall) else note) or "the model itself"


@dataclass(eq=False, slots=True)
class _OpenCall:
    """A call of a layer whose weight trains. It owns its input, lest another tensor take its address meanwhile."""

    layer: str
    module: nn.Module
    x: Tensor
    source: Hashable
    mask: Tensor | None
    held: bool
    claims: list[Claim] = field(default_factory=list)  # of what it saved, its own weight apart

    def close(self) -> LinearClaim:
        """Return the call as a record that holds no tensor."""
        saved = [claim for claim in self.claims if claim.storages]
        return LinearClaim(
            holder=self.layer,
            operation=saved[-1].operation if saved else "",
            shape=tuple(self.x.shape),
            dtype=saved[-1].dtype if saved else self.x.dtype,
            storages=frozenset(key for claim in saved for key in claim.storages),
            source=self.source,
            mask=None if self.mask is None else tuple(sizes([self.mask])),
            held=self.held,
        )


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

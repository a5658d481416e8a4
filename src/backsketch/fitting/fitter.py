"""fit: whether a training step fits into a card, the largest batch and length that do, and what each way costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..argument_checks import check_flag, check_model, check_positive
from ..convert.checkpointed_blocks import uncheckpoint_
from ..convert.conversion import unsketch_
from ..losses.fused_models import unfuse_loss_
from ..memory.optimizer_states import check_optimizer
from ..memory.training_step import Loss
from ..memory.untouched_model import same_randomness
from ..planning.budget import as_budget
from .batches import BatchMaker, Inputs, ResizableBatch
from .fit_result import ADAPTERS, FUSED, WISHES, Fit, FitRow
from .groups import Group, groups_of
from .largest_sizes import MOST_LENGTH, largest_batch, largest_length
from .measuring import check_measurable, step_seconds
from .meta_copy import meta_copy
from .positions import positions, takes_lengths
from .product_types import check_products
from .rank_share import RankShare
from .recurrent_layers import check_recurrent
from .roofline import ACCELERATORS
from .subject import Subject, WaySteps
from .ways import ALL, EXACT, SOME, Way

CARD = "A100"  # whose published limits estimate times


def fit(
    model: nn.Module,
    *args: Any,
    memory: int | str,
    optimizer: str = "adamw",
    ranks: int = 1,
    lora: int | None = None,
    loss: Loss | None = None,
    wish: str = "time",
    measure: bool = False,
    **kwargs: Any,
) -> Fit:
    """Tell whether a training step of ``model`` on a batch fits into ``memory``, for each way to train.

    Nothing is trained: a copy of the model runs on the meta device, which takes no memory. With ``measure`` the model
    itself runs too. It stays as it is.

    Args:
        model: on any device, not sharded.
        *args, **kwargs: one batch, passed to the model; what one rank trains on.
        memory: of one card: bytes, or a size with a unit, "24GiB".
        optimizer: "adamw" (fused), "adamw8bit" (of bitsandbytes) or "sgd" (without momentum).
        ranks: over how many cards FSDP2 shards weights, gradients and states.
        lora: also compare the same ways with adapters of this rank on all linear layers, which needs peft.
        loss: takes the output, returns a scalar. By default ``output.loss``, or the mean of the first output.
        measure: also time real steps of the model, on the device where it is.
        wish: what the best way is to have: least "time", least "noise", the largest "batch" or the largest "length".
    """
    check_model(model)
    limit = as_memory(memory)
    if lora is not None:
        check_positive("lora", lora)
    check_flag("measure", measure)
    if measure:
        check_measurable(model)
    inputs = ResizableBatch.of((args, kwargs))
    return fit_model(
        meta_copy(model), inputs.sized, inputs.batch, inputs.length, memory=limit, optimizer=check_optimizer(optimizer),
        ranks=check_positive("ranks", ranks), lora=lora, loss=loss, wish=wish,
        real=(model, (args, kwargs)) if measure else None,
    )  # fmt: skip


@same_randomness()
def fit_model(
    model: nn.Module,
    batches: BatchMaker,
    batch: int,
    length: int | None,
    *,
    memory: int,
    optimizer: str,
    ranks: int,
    lora: int | None,
    loss: Loss | None,
    wish: str,
    real: tuple[nn.Module, Inputs] | None = None,
) -> Fit:
    """Fit a model that is on the meta device, with batches of any size; time the steps of a real one, if there is."""
    if wish not in WISHES:
        raise ValueError(f"wish must be one of {', '.join(WISHES)}, got {wish!r}")
    check_recurrent(model)
    unfuse_loss_(uncheckpoint_(unsketch_(model)))
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()  # type: ignore[operator]
    most = positions(model) if length is not None else None
    if most is not None and length is not None and length > most:
        raise ValueError(f"length must be at most {most}, the positions that the model has, got {length}")
    check_products(model, batches(batch, length), loss)
    if most is None and length is not None and not takes_lengths(model, batches, loss, batch, length):
        length = None
    fitter = _Fitter(memory, optimizer, ranks, batch, length, most or MOST_LENGTH, real)
    rows = [row for group in groups_of(model, batches, loss, lora) for row in fitter.rows(group)]
    return Fit(
        rows=tuple(rows), memory=memory, batch=batch, length=length, positions=most, optimizer=optimizer, ranks=ranks,
        wish=wish,
    )  # fmt: skip


def as_memory(memory: object) -> int:
    """Return a number of bytes."""
    try:
        value: object = as_budget(memory)
    except (TypeError, ValueError):
        value = None
    if not isinstance(value, int):
        raise ValueError(
            'memory must be a size with a unit ("24GiB", "80 GB") or a positive number of bytes (an int), '
            f"got {memory!r}"
        )
    return value


class _Fitter:
    """What is the same for all rows of one fit."""

    def __init__(
        self,
        memory: int,
        optimizer: str,
        ranks: int,
        batch: int,
        length: int | None,
        most: int,
        real: tuple[nn.Module, Inputs] | None,
    ) -> None:
        self._memory, self._optimizer, self._ranks = memory, optimizer, ranks
        self._batch, self._length, self._most = batch, length, most
        self._real = real
        self._exact_seconds: float | None = None
        self._few: dict[tuple[str, ...], bool] = {}  # blocks -> whether few of them can stand for all

    def rows(self, group: Group) -> Iterator[FitRow]:
        """Yield a row for each way to train a group."""
        blocks = group.subject.blocks
        if blocks not in self._few:
            self._few[blocks] = self._few_do(group.subject)
        for way in group.ways:
            yield self._row(group, way, self._few[blocks])

    def _few_do(self, subject: Subject) -> bool:
        """Tell whether few blocks can stand for all: whether a step of all of them has the same peak to the byte."""
        steps = WaySteps(subject, EXACT, few=True)
        if not steps.runs_few:
            return False
        try:
            foretold = steps.at(self._batch, self._length, 0)
        except (IndexError, KeyError, AttributeError):  # the model counts its blocks
            return False
        whole = WaySteps(subject, EXACT, few=False).at(self._batch, self._length, 0)
        share = RankShare.of(subject.model, subject.blocks, self._optimizer, 1)
        same = foretold.in_order and whole.in_order and foretold.kept == whole.kept
        return same and foretold.peak(share).total == whole.peak(share).total

    def _row(self, group: Group, way: Way, few: bool) -> FitRow:
        subject = group.subject
        share = RankShare.of(subject.model, subject.blocks, self._optimizer, self._ranks)
        steps = WaySteps(subject, way, few=few)
        chosen = self._checkpointed(steps, way, share, subject.depth)
        given = steps.at(self._batch, self._length, chosen, kernels=True)
        seconds = ACCELERATORS[CARD].seconds(given.kernels)
        self._exact_seconds = self._exact_seconds or seconds
        code = way.code
        if chosen:
            some = "" if way.checkpointed == ALL else f"[:{chosen}]"
            code = (f"bs.checkpoint_(model, bs.blocks_of(model){some})", *code)
        code = (*group.code, *code)
        return FitRow(
            group=group.name, way=way.name, code=code, noise=way.noise, weights=share.weights,
            gradients=share.gradients, states=share.states, activations=given.kept, peak=given.peak(share),
            largest_batch=largest_batch(steps, self._batch, self._length, chosen, share=share, memory=self._memory),
            largest_length=self._largest_length(steps, chosen, share),
            seconds=seconds, time=seconds / self._exact_seconds, measured_seconds=self._measured(group, way, chosen),
            checkpointed=(chosen, subject.depth),
        )  # fmt: skip

    def _measured(self, group: Group, way: Way, checkpointed: int) -> float | None:
        """Return the seconds of a real step, if there is a model for it; there is none with adapters."""
        if self._real is None or group.name.startswith(ADAPTERS):
            return None
        (model, inputs), fused = self._real, group.name.endswith(FUSED)
        blocks = group.subject.blocks[:checkpointed]
        return step_seconds(model, inputs, group.subject.loss, way, blocks, fused=fused)

    def _checkpointed(self, steps: WaySteps, way: Way, share: RankShare, depth: int) -> int:
        """Return how many blocks are checkpointed: all, none, or the fewest with which it fits; else half."""
        if way.checkpointed != SOME:
            return depth if way.checkpointed == ALL else 0

        def fits(count: int) -> bool:
            kernels = count > 0  # as the row asks for them anyway; it has at least one block checkpointed
            step = steps.at(self._batch, self._length, count, kernels=kernels)
            return step.peak(share).total <= self._memory

        low, high = steps.choices[0] - 1, steps.choices[-1]
        if fits(0) or not fits(high):
            return depth // 2
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def _largest_length(self, steps: WaySteps, chosen: int, share: RankShare) -> int | None:
        if self._length is None:
            return None
        return largest_length(
            steps, self._batch, self._length, chosen, share=share, memory=self._memory, most=self._most
        )  # fmt: skip

"""A log of one training step: every storage that came or went, cut at the moments at which a block begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..garbage import without_collector
from ..memory.live_storages import ROLES, Change
from ..memory.meta_device import meta_step
from ..memory.peak import peak_memory
from ..memory.saved import saved_memory
from ..torch_private import in_backward, tree_leaves
from .known_kernels import run_known
from .launch_counter import Kernel, LaunchCounter
from .segment import BACKWARD, BEFORE, FORWARD, Segment


def record_step(
    model: nn.Module, blocks: Sequence[str], forward: Callable[[], Tensor], *, kernels: bool = False
) -> tuple[Segment, ...]:
    """Run a step of a model on the meta device, and return its log, without the model's own tensors.

    Args:
        model: on the meta device, in train(), without gradients.
        blocks: the names of its blocks, in the order in which they run.
        forward: runs it to a scalar loss.
        kernels: whether to write down kernels too.
    """
    with ExitStack() as stack:
        stack.enter_context(without_collector())
        stack.enter_context(meta_step())
        counter = LaunchCounter() if kernels else None
        peak = stack.enter_context(_StepMemory(model, counter))
        saved = stack.enter_context(saved_memory(model))

        def count(phase: str) -> tuple[int, int, int]:
            held = 0 if phase == BACKWARD else saved.activations
            return len(peak.changes), held, 0 if counter is None else counter.launches

        marks = _Marks(count, lambda: len(peak.changes))
        own = len(peak.changes)
        stack.enter_context(marks.at(model, blocks))
        marks.set(BEFORE, None)
        loss = forward()
        kept = saved.activations
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    for parameter in model.parameters():
        parameter.grad = None
    launched = () if counter is None else tuple(counter.kernels)
    return tuple(marks.segments(peak.changes, own, kept, launched))


class _StepMemory(peak_memory):
    """The peak of a step whose operators run from memory, one mode for all that follows them; it counts kernels too."""

    def __init__(self, model: nn.Module, counter: LaunchCounter | None) -> None:
        super().__init__(model)
        self._counter = counter

    def run(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = run_known(operator, args, kwargs)
        if self._counter is not None:
            self._counter.count(operator, args, kwargs, result)
        return result


class _Marks:
    """The moments at which blocks begin, forward and backward, with what was counted until then."""

    def __init__(self, count: Callable[[str], tuple[int, int, int]], changes: Callable[[], int]) -> None:
        self._count, self._changes = count, changes
        self._marks: list[tuple[str, int | None, tuple[int, int, int]]] = []
        self._done: dict[int, int] = {}  # mark -> how many changes there were when its block was done

    def set(self, phase: str, block: int | None) -> None:
        self._marks.append((phase, block, self._count(phase)))

    def done(self, phase: str, block: int) -> None:
        """Take note that a block is done, if it is the one that began last."""
        if self._marks[-1][:2] == (phase, block):
            self._done[len(self._marks) - 1] = self._changes()

    @contextmanager
    def at(self, model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
        """Set marks inside the block of code whenever a block of the model begins."""
        handles: list[RemovableHandle] = []
        for index, name in enumerate(blocks):
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(self._starts(index), with_kwargs=True))
            handles.append(module.register_forward_hook(self._follow(index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _starts(self, block: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not in_backward():  # not where a checkpoint runs it again
                self.set(FORWARD, block)
                for given in _with_gradient((args, kwargs))[:1]:
                    given.register_hook(lambda _: self.done(BACKWARD, block))  # type: ignore[no-untyped-call]

        return hook

    def _follow(self, block: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not in_backward():
                self.done(FORWARD, block)
                for made in _with_gradient(output)[:1]:
                    made.register_hook(lambda _: self.set(BACKWARD, block))  # type: ignore[no-untyped-call]

        return hook

    def segments(
        self, changes: Sequence[Change], own: int, kept: int, kernels: tuple[Kernel, ...]
    ) -> Iterator[Segment]:
        ends = [*(counts for _, _, counts in self._marks[1:]), (len(changes), kept, len(kernels))]
        for mark, (phase, block, (start, held, first)) in enumerate(self._marks):
            end, held_then, last = ends[mark]
            start = max(start, own)
            mine = changes[start:end]
            yield Segment(
                phase,
                block,
                torch.tensor([change for _, change, _ in mine], dtype=torch.float64),
                torch.tensor([ROLES.index(item.role) for item, _, _ in mine], dtype=torch.long),
                tuple(place for _, _, place in mine),
                self._done.get(mark, end) - start,
                0 if phase == BACKWARD else (kept if self._ends_forward(phase, block) else held_then) - held,
                kernels[first:last],
            )

    def _ends_forward(self, phase: str, block: int | None) -> bool:
        """Tell whether a mark is the last one before backward."""
        last = [(each, index) for each, index, _ in self._marks if each != BACKWARD][-1]
        return last == (phase, block)


def _with_gradient(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]

"""RankShare: what one of several ranks holds of a model under FSDP2, beside what a step makes.

Each block is a group of its own, and all other parameters are the root's group. A rank holds its shard of weights,
gradients and optimiser states; each dimension 0 is padded to a multiple of the ranks, in whole weights too. What else
FSDP2 holds, and when, is what ``fully_shard`` of torch 2.13 does by default:

- An all-gather fills a buffer, from which the whole weights are copied. In forward the buffer stays until the next
  block has gathered its own; in backward it is made one block ahead and goes once it is copied.
- The whole weights of a block go when its forward or its backward is done; the root's when all of backward is.
- When a block's backward is done, its gradients are copied into a buffer, which is reduced and scattered. It stays
  until the next block is as far. The root's gradients are reduced when all of backward is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..memory.optimizer_states import states_of
from .segment import FORWARD


@dataclass(frozen=True, slots=True)
class Around:
    """Bytes of whole weights and of buffers of collectives in a segment of a step.

    Attributes:
        start: when its block starts.
        inside: while the block runs.
        end: when the block is done, and its gradients are not yet reduced.
        after: from then to the end of the segment.
    """

    start: int
    inside: int
    end: int
    after: int


@dataclass(frozen=True)
class RankShare:
    """Bytes of a rank.

    Attributes:
        ranks: how many there are.
        weights: its parameters, and all buffers.
        gradients: of its parameters that train.
        states: of the optimiser.
        root: the weights of the root's group, all of them.
        blocks: the weights of each block, all of them.
        root_reduced: the gradients of the root's group, all of them.
        blocks_reduced: the gradients of each block, all of them.
        shares: the share of each block's gradient that a rank keeps.
    """

    ranks: int
    weights: int
    gradients: int
    states: int
    root: int
    blocks: tuple[int, ...]
    root_reduced: int
    blocks_reduced: tuple[int, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[str], optimizer: str, ranks: int) -> RankShare:
        own = [list(model.get_submodule(name).parameters()) for name in blocks]
        inside = {id(parameter) for group in own for parameter in group}
        everything = list(model.parameters())
        outside = [parameter for parameter in everything if id(parameter) not in inside]
        trained = _trained(everything)
        buffers = sum(buffer.untyped_storage().nbytes() for buffer in {id(b): b for b in model.buffers()}.values())
        return cls(
            ranks=ranks,
            weights=_shards(everything, ranks) + buffers,
            gradients=_shards(trained, ranks),
            states=sum(states_of(optimizer, shard_shape(each, ranks), each.dtype) for each in trained),
            root=ranks * _shards(outside, ranks),
            blocks=tuple(ranks * _shards(group, ranks) for group in own),
            root_reduced=ranks * _shards(_trained(outside), ranks),
            blocks_reduced=tuple(ranks * _shards(_trained(group), ranks) for group in own),
            shares=tuple(_share(_trained(group), ranks) for group in own),
        )

    def around(self, phase: str, block: int | None) -> Around:
        """Return the bytes of collectives in a segment, beside the rank's own shards."""
        if self.ranks == 1:
            return Around(0, 0, 0, 0)
        if block is None:  # the root's own buffer stays until the first block has gathered
            return Around(2 * self.root, 2 * self.root, 2 * self.root, 2 * self.root)
        whole = self.blocks[block]
        if phase == FORWARD:
            previous = self.blocks[block - 1] if block else self.root
            inside = self.root + 2 * whole
            return Around(self.root + previous + whole, inside, inside, self.root + whole)
        following = self.root + (self.blocks[block - 1] if block else 0)
        later = self.blocks_reduced[block + 1] if block + 1 < len(self.blocks) else 0
        done = following + self.blocks_reduced[block]
        return Around(self.root + 2 * whole + later, following + whole + later, done, done)

    @property
    def last(self) -> int:
        """Return the bytes of collectives when backward is done and the root's gradients are not yet reduced."""
        return 0 if self.ranks == 1 else self.root_reduced

    def gradient_share(self, block: int | None) -> float:
        """Return the share of a block's gradient that a rank keeps once it is reduced."""
        return 1.0 if block is None else self.shares[block]


def shard_shape(parameter: Tensor, ranks: int) -> tuple[int, ...]:
    """Return the shape of a rank's shard: dimension 0 is split evenly, and the largest shard counts."""
    shape = tuple(parameter.shape)
    return (-(-shape[0] // ranks), *shape[1:]) if shape else shape


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _shards(parameters: Iterable[Tensor], ranks: int) -> int:
    return sum(_shard(parameter, ranks) for parameter in parameters)


def _shard(parameter: Tensor, ranks: int) -> int:
    size = parameter.element_size()
    for length in shard_shape(parameter, ranks):
        size *= length
    return size


def _share(parameters: Sequence[Tensor], ranks: int) -> float:
    whole = sum(each.nbytes for each in parameters)
    return _shards(parameters, ranks) / whole if whole else 1.0

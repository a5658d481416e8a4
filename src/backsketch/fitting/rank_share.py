"""RankShare: what one of several ranks holds of a model under FSDP2, beside what a step makes.

Each block is a group of its own, and all other parameters are the root's group. A rank holds its shard of weights,
gradients and optimiser states. While a block runs, its weights are gathered, and those of the block that runs next.
The root's weights stay gathered for the whole step, and its gradients are reduced when backward ends; those of a block
when its backward ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..memory.optimizer_states import states_of
from .segment import BACKWARD, FORWARD


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
        shares: the share of each block's gradient that a rank keeps.
    """

    ranks: int
    weights: int
    gradients: int
    states: int
    root: int
    blocks: tuple[int, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[str], optimizer: str, ranks: int) -> RankShare:
        own = [list(model.get_submodule(name).parameters()) for name in blocks]
        inside = {id(parameter) for group in own for parameter in group}
        everything = list(model.parameters())
        trained = [parameter for parameter in everything if parameter.requires_grad]
        buffers = sum(buffer.untyped_storage().nbytes() for buffer in {id(b): b for b in model.buffers()}.values())
        return cls(
            ranks=ranks,
            weights=_shards(everything, ranks) + buffers,
            gradients=_shards(trained, ranks),
            states=sum(states_of(optimizer, shard_shape(each, ranks), each.dtype) for each in trained),
            root=sum(each.nbytes for each in everything if id(each) not in inside),
            blocks=tuple(sum(each.nbytes for each in group) for group in own),
            shares=tuple(_share([each for each in group if each.requires_grad], ranks) for group in own),
        )

    def gathered(self, phase: str, block: int | None) -> int:
        """Return the bytes of whole weights that are there while a block runs, beside the rank's own shards."""
        if self.ranks == 1:
            return 0
        if block is None:
            return self.root + sum(self.blocks[:1])
        following = {FORWARD: block + 1, BACKWARD: block - 1}[phase]
        prefetched = self.blocks[following] if 0 <= following < len(self.blocks) else 0
        return self.root + self.blocks[block] + prefetched

    def gradient_share(self, block: int | None) -> float:
        """Return the share of a block's gradient that a rank keeps once it is reduced."""
        return 1.0 if block is None else self.shares[block]


def shard_shape(parameter: Tensor, ranks: int) -> tuple[int, ...]:
    """Return the shape of a rank's shard: dimension 0 is split evenly, and the largest shard counts."""
    shape = tuple(parameter.shape)
    return (-(-shape[0] // ranks), *shape[1:]) if shape else shape


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

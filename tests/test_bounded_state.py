"""A long run holds no more at its end than after its first steps."""

import gc
from collections import Counter

import pytest
import torch
from torch import nn

from backsketch import SketchConfig, sketch_
from backsketch.linear import sharing
from backsketch.masks import promise, scopes


class Network(nn.Module):
    """Layers that share an input, padded rows, and an input that is held anyway."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, attention_mask):
        return self.out((self.q(x) + self.k(x)).relu()) * attention_mask.unsqueeze(-1)


def train(model, steps, device="cpu"):
    """Run steps on batches of many sizes, with a mask that is new in each."""
    for step in range(steps):
        x = torch.randn(2, 3 + step % 7, 8, device=device)
        mask = torch.ones(2, 3 + step % 7, dtype=torch.long, device=device)
        mask[0, 2:] = 0
        model(x, attention_mask=mask).sum().backward()
        model.zero_grad()


def held():
    """Count what is alive: objects by type, and entries of the library's own tables."""
    gc.collect()
    objects = Counter(type(each).__name__ for each in gc.get_objects())
    tables = (
        sharing._memo.entries,
        scopes._by_call,
        scopes._replaced,
        scopes.in_force._scopes,
        promise._flags._waiting,
    )
    return objects, [len(table) for table in tables]


@pytest.mark.parametrize("steps", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", [SketchConfig(ratio=0.5), SketchConfig(kind="hadamard", ratio=0.5, bits=4)], ids=str)
def test_nothing_grows_with_the_number_of_steps(config, steps):
    model = sketch_(Network(), config)
    train(model, 300)
    before, tables = held()
    train(model, steps)
    after, tables_after = held()
    assert tables_after == tables == [0] * len(tables)
    grown = {name: count for name, count in (after - before).items() if count > steps // 10}
    assert not grown


def test_tables_of_tensors_have_a_bound():
    from backsketch.noise.moments import _coefficients
    from backsketch.noise.row_blocks import blocks_of
    from backsketch.sketches.orthonormal import _block_matrix
    from backsketch.storage.packing import _column_dither

    for table in (sharing._scattered, _column_dither, _block_matrix, _coefficients, blocks_of):
        assert table.cache_info().maxsize is not None, table

"""A long run holds no more at its end than after its first steps."""

import gc
from collections import Counter

import pytest
import torch
from torch import nn

from backsketch import NoiseMonitor, SketchConfig, sketch_
from backsketch.linear import checksum, sharing
from backsketch.masks import checkpoint_masks, promise, scopes
from backsketch.monitor.noise_records import Record

STRAY_OBJECTS = 100  # of one type: what the test runner and gc make beside; a leak is one or more a step


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
        checkpoint_masks._by_call,
        checkpoint_masks._replaced,
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
    assert not {name: count for name, count in (after - before).items() if count > STRAY_OBJECTS}


def test_a_monitor_that_forgets_holds_no_more_after_many_steps():
    model = sketch_(Network(), SketchConfig(ratio=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    records: list[Record] = []

    def watch(monitor, steps):
        for _ in range(steps):
            train(model, 1)
            model(torch.randn(2, 5, 8), attention_mask=torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.forget()
        records.clear()

    with NoiseMonitor(model, callback=records.append) as monitor:
        watch(monitor, 50)
        before, tables = held()
        watch(monitor, 500)
        after, tables_after = held()
    assert tables_after == tables
    assert not {name: count for name, count in (after - before).items() if count > STRAY_OBJECTS}


def test_tables_of_tensors_have_a_bound():
    from backsketch.noise.moments import _coefficients
    from backsketch.noise.row_blocks import row_blocks_of
    from backsketch.sketches.orthonormal import _block_matrix
    from backsketch.storage.dither import column_dither

    for table in (checksum._weights, column_dither, _block_matrix, _coefficients, row_blocks_of):
        assert table.cache_info().maxsize is not None, table

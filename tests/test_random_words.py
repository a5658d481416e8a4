"""Random numbers by position: uniform, independent between rows and layers, and the same on every path."""

import math

import pytest
import torch

from backsketch import SketchConfig
from backsketch.linear.keeping import keep, sketch_for
from backsketch.linear.weight_gradient import weight_gradient
from backsketch.random_words import (
    CHOICE_STREAM,
    DITHER_STREAM,
    SKETCH_STREAM,
    line,
    mixed_positions,
    order_words,
    pairwise_words,
    random_words,
)
from backsketch.seeds import draw_seed, seed_value
from backsketch.sketches.draws import Draws
from backsketch.sketches.rows import Rows
from backsketch.sketches.smallest import places_of_smallest

CPU = torch.device("cpu")
COUNT = 1 << 16


def words(seed, count=COUNT, stream=DITHER_STREAM, first=0):
    return random_words(seed, stream, first, count, CPU)


def correlation(one, other):
    return float(torch.corrcoef(torch.stack((one.double(), other.double())))[0, 1])


def test_the_function_is_the_one_that_docs_storage_defines():
    """Plain integers, written once more: another kernel is written against these."""

    def mix(x):
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
        x = ((x ^ (x >> 15)) * 0x735A2D97) % 2**32
        return x ^ (x >> 15)

    seed = 0x123456789ABCDEF
    low, high = mix(seed % 2**32 ^ DITHER_STREAM), mix(seed >> 32)
    expected = [mix((mix(position ^ low) + high) % 2**32) for position in range(100)]
    assert words(seed, 100).tolist() == expected
    assert words(seed, 60, first=40).tolist() == expected[40:]
    assert expected[:3] == [1370833165, 2733184644, 2765397026]


def test_pairwise_words_are_a_line_through_mixed_positions():
    seed = 0x123456789ABCDEF
    slope, offset = line(seed, DITHER_STREAM)
    assert slope % 2 == 1
    four = words(seed, 4, first=2**32 - 4).tolist()[::-1]
    assert (slope % 2**64, offset % 2**64) == ((four[0] << 32 | four[1]) | 1, four[2] << 32 | four[3])
    mixed = [0, 2261973619, 229111015]
    drawn = pairwise_words(seed, DITHER_STREAM, 3, CPU)
    assert [word % 2**64 for word in drawn.tolist()] == [(slope * x + offset) % 2**64 for x in mixed]
    on_device = torch.tensor(seed)
    assert torch.equal(pairwise_words(on_device, DITHER_STREAM, 3, CPU), drawn)


@pytest.mark.parametrize("count", [3, 8, 200])
def test_sums_of_pairwise_words_vary_as_sums_of_independent_ones(count):
    """Their variance is that of the gradient; their fourth moment tells that no seed is far off."""
    draws = 8000
    drawn = torch.stack([pairwise_words(seed * 7919 + 1, DITHER_STREAM, count, CPU) for seed in range(draws)])
    uniform = drawn.double() * 2.0**-64
    covariance = torch.cov(uniform.t()) * 12
    assert (covariance - torch.eye(count)).abs().max() < 6 / math.sqrt(draws)
    total = uniform.sum(1)
    assert abs(float(total.mean())) < 5 * math.sqrt(count / 12 / draws)
    assert abs(float(total.var()) / (count / 12) - 1) < 5 * math.sqrt(2 / draws)
    kurtosis = float((total - total.mean()).pow(4).mean() / total.var() ** 2)
    assert abs(kurtosis - (3 - 1.2 / count)) < 5 * math.sqrt(24 / draws)
    assert len(pairwise_words(5, CHOICE_STREAM, 1 << 20, CPU).unique()) == 1 << 20


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, 0x5DEECE66D])
def test_words_are_uniform_in_every_bit_and_as_a_whole(seed):
    drawn = words(seed)
    assert 0 <= drawn.min() <= drawn.max() < 2**32
    bits = torch.stack([(drawn >> bit) & 1 for bit in range(32)]).double()
    assert (bits.mean(1) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(COUNT)
    together = (bits - 0.5) @ (bits - 0.5).t() / COUNT * 4  # pairs of bits
    assert (together - torch.eye(32)).abs().max() < 5 / math.sqrt(COUNT)
    counts = torch.bincount(drawn >> 24, minlength=256).double()
    chi_squared = float((counts - COUNT / 256).square().sum() / (COUNT / 256))
    assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("lag", [1, 2, 7, 64, 768, 4096])
def test_rows_are_independent(lag):
    drawn = words(12345, COUNT + lag)
    assert abs(correlation(drawn[:-lag], drawn[lag:])) < 5 / math.sqrt(COUNT)
    low = drawn & 0xFFFF
    assert abs(correlation(low[:-lag], low[lag:])) < 5 / math.sqrt(COUNT)


def test_seeds_that_differ_in_one_bit_and_streams_of_one_seed_are_independent():
    seed = 0x2545F4914F6CDD1D
    drawn = words(seed)
    others = [words(seed ^ 1 << bit) for bit in range(63)] + [words(seed, stream=SKETCH_STREAM)]
    assert max(abs(correlation(drawn, other)) for other in others) < 5 / math.sqrt(COUNT)
    flipped = torch.stack([(drawn ^ other) >> bit & 1 for other in others for bit in range(32)])
    assert (flipped.double().mean(1) - 0.5).abs().max() < 6 * 0.5 / math.sqrt(COUNT)  # of 2,048 shares


def test_a_seed_on_the_device_gives_the_same_words():
    seed = torch.tensor(0x2545F4914F6CDD1D)
    assert torch.equal(words(seed), words(int(seed)))
    assert seed_value(seed) == int(seed)
    on_meta = seed.to("meta")
    assert seed_value(on_meta) is on_meta  # it is never read
    assert random_words(on_meta, DITHER_STREAM, 0, 7, torch.device("meta")).shape == (7,)


def test_orders_are_uniform_and_have_no_ties():
    counts = torch.zeros(24)
    for seed in range(6000):
        order = Draws(seed * 7919, CPU).keys(4).argsort()
        counts[int(order[0] * 6 + (order[1] - (order[1] > order[0]).long()) * 2 + (order[2] > order[3]).long())] += 1
    assert abs(float((counts - 250).square().sum() / 250) - 23) < 5 * math.sqrt(46)
    keys = Draws(1, CPU).keys(1 << 20)
    assert len(keys.unique()) == len(keys)
    assert keys.min() >= 0


@pytest.mark.parametrize(("rows", "dim", "draws"), [(12, 5, 8000), (3, 2, 8000), (32, 3, 400_000), (32, 1, 400_000)])
def test_every_row_and_every_pair_is_chosen_equally_often(rows, dim, draws):
    chosen = torch.zeros(draws, rows)
    if draws < 10_000:
        for seed in range(draws):
            chosen[seed, Rows(rows, dim, seed).chosen(CPU)] = 1
    else:  # all seeds at once
        slope, offset = line(torch.arange(draws).unsqueeze(1) * 104729, CHOICE_STREAM)
        keys = (slope * mixed_positions(rows, CPU) + offset).square()
        assert torch.equal(keys[7], order_words(7 * 104729, CHOICE_STREAM, rows, CPU))
        chosen.scatter_(1, keys.topk(dim, largest=False).indices, 1.0)
    share = dim / rows
    assert (chosen.mean(0) - share).abs().max() < 5 * math.sqrt(share * (1 - share) / draws)
    if dim == 1:
        return
    pairs, expected = chosen.t() @ chosen / draws, share * (dim - 1) / (rows - 1)
    apart = ~torch.eye(rows, dtype=torch.bool)
    assert (pairs[apart] - expected).abs().max() < 5 * math.sqrt(expected * (1 - expected) / draws)


def test_signs_are_balanced_and_independent():
    signs = torch.stack([Draws(seed, CPU).signs(100) for seed in range(4000)])
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    together = signs.t() @ signs / len(signs)
    assert (together - torch.eye(100)).abs().max() < 5.5 / math.sqrt(len(signs))
    assert signs.mean(0).abs().max() < 5 / math.sqrt(len(signs))
    one = Draws(3, CPU)
    assert torch.equal(torch.cat((one.signs(64), one.signs(36))), Draws(3, CPU).signs(100))


@pytest.mark.parametrize("kind", ["rows", "hash", "hadamard", "rademacher"])
def test_nothing_is_read_back_from_a_device(kind):
    """A step can be captured in a CUDA graph: meta stands in for the device, and has no value to read."""
    x, y = torch.empty(64, 256, device="meta"), torch.empty(64, 40, device="meta")
    config = SketchConfig(kind=kind, ratio=0.5, bits=3, rotate=True, center=True)
    seed = torch.empty((), dtype=torch.int64, device="meta")
    sketch = sketch_for(config, 64, seed)
    assert sketch.seed is seed
    assert sketch.compress(x).shape == (32, 256)
    assert weight_gradient(keep(x, config, seed), y, config, 256).shape == (40, 256)


def test_a_captured_graph_draws_its_seed_on_the_device(monkeypatch):
    monkeypatch.setattr("backsketch.seeds.is_capturing", lambda device: device.type == "meta")
    assert draw_seed(torch.device("meta")).is_meta
    assert draw_seed(CPU).device == CPU


def test_the_smallest_keys_are_found_as_by_torch_whatever_their_distribution():
    even = order_words(7, CHOICE_STREAM, 5000, CPU)
    for keys in (even, even >> 1, -(even >> 40) * 5000 - torch.arange(5000), torch.arange(5000) - 2500, even[:1024]):
        for count in (0, 1, len(keys) // 3, len(keys)):
            law = keys.topk(count, largest=False).indices
            found = places_of_smallest(keys, count)
            assert torch.equal(keys[found], keys[law])
            assert found.unique().numel() == count

"""The deflation experiment: its estimate is unbiased, its noise is the one it reports, its bytes fit the budget."""

import json
from pathlib import Path

import pytest
import torch

from backsketch import SketchConfig

pytest.importorskip("rich")

from deflated import DeflatedLinear, Deflation
from deflation import WAYS, Way, compare, table

from backsketch_bench.activations import Activation

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
ROWS, FEATURES, OUT = 48, 40, 6
DRAWS = 800


def layer(deflation, valid):
    module = DeflatedLinear(FEATURES, OUT)
    module.deflation, module.valid = deflation, valid
    return module


def batch():
    x = torch.randn(ROWS, 3) @ torch.randn(3, FEATURES) + 0.3 * torch.randn(ROWS, FEATURES)
    valid = torch.arange(ROWS) % 4 != 0
    return x, torch.randn(ROWS, OUT) * valid.unsqueeze(1), valid


def gradient(module, x, y):
    return torch.autograd.grad(module(x), module.weight, y)[0]


@pytest.mark.parametrize("bits", [None, 4])
def test_the_estimate_is_unbiased_and_as_noisy_as_reported(bits):
    x, y, valid = batch()
    deflation = Deflation(3, 1, SketchConfig(dim=9, bits=bits))
    module = layer(deflation, valid)
    errors = torch.stack([gradient(module, x, y) - y.t() @ x for _ in range(DRAWS)]).double()
    standard_error = errors.std(0) / DRAWS**0.5
    assert (errors.mean(0).abs() <= 5 * standard_error).all()
    squares = errors.square().sum((1, 2))
    reported = torch.stack([deflation.variance(x.double(), y.double(), valid, seed) for seed in range(200)])
    allowed = 5 * (squares.var() / DRAWS + reported.var() / len(reported)).sqrt()
    assert abs(squares.mean() - reported.mean()) <= allowed


def test_an_exact_part_of_full_rank_leaves_no_noise():
    x, y, valid = batch()
    module = layer(Deflation(FEATURES, 0, SketchConfig(dim=4)), valid)
    torch.testing.assert_close(gradient(module, x, y), y.t() @ x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [0.1, 0.5, 1.0])
def test_bytes_fit_the_budget_and_one_row_more_would_not(way, budget):
    rows, features = 200, 128
    setting = way.spend(budget, rows, features)
    allowed = budget * rows * features * 4
    dim = 0 if setting is None else setting.config.dim
    assert setting is None or setting.kept_bytes(rows, features) <= allowed
    if dim < rows:
        more = Deflation(way.rank, way.power, SketchConfig(dim=dim + 1, bits=way.bits, center=way.center))
        assert more.kept_bytes(rows, features) > allowed


def test_ways_are_compared_layer_by_layer():
    x, y, valid = batch()
    layers = [Activation("a", x.view(4, 12, -1), y.view(4, 12, -1), valid.view(4, 12))]
    results = compare(layers, [Way("rows"), Way("rank 3", rank=3, power=1)], [0.4], rounds=1)
    assert [result.way for result in results] == ["rows", "rank 3"]
    assert results[1].noise < results[0].noise
    assert table(results).row_count == 2


def test_the_readme_has_the_figures_of_the_record():
    results = json.loads((EXPERIMENTS / "reports" / "deflation.json").read_text())["results"]
    lines = (EXPERIMENTS / "README.md").read_text().replace("**", "").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| rows")]
    assert len(rows) == len({result["way"] for result in results})
    for way, *cells in rows:
        found = [result["noise"] for result in results if result["way"] == way]
        told = [float(cell) for cell in cells if cell != "does not fit"]
        assert told == pytest.approx(found, rel=0.05), way

"""cost: the paper's table of complexities, against what is measured."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from backsketch import SketchConfig, cost, peak_memory, saved_memory, sketch_
from backsketch.linear.keeping import sketch_for
from cases import BLOCK, KINDS, every_config

ROWS, IN, OUT = 96, 24, 40


def layer(config):
    built = nn.Linear(IN, OUT, bias=False)
    return built if config is None else sketch_(built, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("config", [None, *every_config(0.1), *every_config(0.5)], ids=str)
def test_kept_bytes_are_those_measured(config, dtype):
    model = layer(config).to(dtype)
    with saved_memory(model) as saved:
        out = model(torch.randn(ROWS, IN, dtype=dtype))
    assert cost(config, ROWS, IN, OUT, dtype.itemsize).kept == saved.activations
    del out


def gemm_flops(target, left, right, out_shape=None, **others):
    return 2 * torch.Size(left).numel() * right[-1]


IN_PLACE = {torch.ops.aten.addmm_: gemm_flops, torch.ops.aten.baddbmm_: gemm_flops}  # torch counts neither
GEMM_KINDS = [SketchConfig(kind=kind, ratio=0.25) for kind in ("rows", "hash", "gaussian", "rademacher", "hadamard")]
BLOCKED_KINDS = [SketchConfig(kind=kind, ratio=0.25, block=BLOCK) for kind in ("gaussian", "cosine", "hadamard")]


@pytest.mark.parametrize("config", [None, *GEMM_KINDS, *BLOCKED_KINDS], ids=str)
def test_flops_are_those_counted(config):
    model, x = layer(config), torch.randn(ROWS, IN, requires_grad=True)
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    with counter:
        out = model(x)
    forward = counter.get_total_flops()
    with counter:
        out.sum().backward()
    expected = cost(config, ROWS, IN, OUT)
    uncounted = 0  # signs and additions are FLOPs too, but no GEMM
    if config in GEMM_KINDS:
        uncounted = {"hash": 2 * ROWS, "hadamard": ROWS}.get(config.kind, 0)
    assert expected.forward - uncounted * IN == forward
    assert expected.backward - uncounted * OUT == counter.get_total_flops()


def test_the_papers_table():
    dim = 12
    exact = cost(None, ROWS, IN, OUT)
    dense = cost(SketchConfig(kind="gaussian", dim=dim), ROWS, IN, OUT)
    assert (exact.forward, exact.backward) == (2 * ROWS * IN * OUT, 4 * ROWS * IN * OUT)
    assert dense.forward == 2 * (ROWS * IN * OUT + ROWS * dim * IN)
    assert dense.backward == 2 * (ROWS * IN * OUT + ROWS * dim * OUT + dim * IN * OUT)


def test_blocks_cost_a_blocks_share_of_the_dense_sketch():
    dense = cost(SketchConfig(kind="gaussian", ratio=0.25), ROWS, IN, OUT)
    blocked = cost(SketchConfig(kind="gaussian", ratio=0.25, block=BLOCK), ROWS, IN, OUT)
    sketching = dense.forward - 2 * ROWS * IN * OUT
    assert blocked.forward - 2 * ROWS * IN * OUT == sketching * BLOCK // ROWS
    assert blocked.kept == dense.kept


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_batch_costs_no_sketching(kind):
    whole = cost(SketchConfig(kind=kind, ratio=1.0), ROWS, IN, OUT)
    exact = cost(None, ROWS, IN, OUT)
    assert (whole.forward, whole.backward, whole.transient) == (exact.forward, exact.backward, 0)


@pytest.mark.parametrize(
    "config",
    [
        *every_config(0.1),
        *every_config(
            0.5,
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [2048, 5000])
def test_helpers_are_of_the_size_announced(config, rows):
    x, seed = torch.randn(rows, 256), torch.tensor(0)
    with peak_memory() as peak:
        out = sketch_for(config, rows, seed).compress(x)
    helpers = [
        size for item, size in peak.peak.live.items() if tuple(item.shape) not in (tuple(x.shape), tuple(out.shape))
    ]
    announced = cost(config, rows, 256, 256).transient
    assert announced <= sum(helpers) <= 6 * announced


@pytest.mark.parametrize("name", ["rows", "in_features", "out_features", "itemsize"])
def test_sizes_are_positive(name):
    sizes = {"rows": 3, "in_features": 3, "out_features": 3, "itemsize": 4, name: -5}
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got -5"):
        cost(SketchConfig(), **sizes)

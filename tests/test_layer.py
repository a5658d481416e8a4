"""SketchedLinear is an nn.Linear."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from backsketch import SketchConfig, SketchedLinear
from cases import saved_storages

CONFIG = SketchConfig(ratio=0.5)


def test_is_built_like_a_linear_and_shares_its_state_dict():
    layer = SketchedLinear(8, 4, bias=False, dtype=torch.float64, config=CONFIG)
    plain = nn.Linear(8, 4, bias=False, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(10, 8, dtype=torch.float64)
    assert torch.equal(layer(x), plain(x))
    assert "rows, ratio=0.5" in repr(layer)


@pytest.mark.parametrize("config", [None, 0.5, {"ratio": 0.5}])
def test_refuses_what_is_not_a_config(config):
    with pytest.raises(TypeError, match="config must be a SketchConfig"):
        SketchedLinear(8, 4, config=config)


def test_eval_is_plain_linear():
    layer = SketchedLinear(8, 4, config=CONFIG).eval()
    out = layer(torch.randn(10, 8))
    assert type(out.grad_fn).__name__ == "AddmmBackward0"
    with torch.no_grad():
        assert not saved_storages(lambda: layer(torch.randn(10, 8)))


def test_frozen_keeps_nothing_but_the_weight():
    layer = SketchedLinear(8, 4, config=CONFIG).requires_grad_(False)
    assert set(saved_storages(lambda: layer(torch.randn(10, 8, requires_grad=True)))) == {
        layer.weight.untyped_storage().data_ptr()
    }


def test_survives_deepcopy_and_pickle():
    layer = SketchedLinear(8, 4, config=CONFIG)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    others = (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(saved, weights_only=False))
    for other in others:
        assert type(other) is SketchedLinear
        assert other.config == CONFIG
        assert torch.equal(other.weight, layer.weight)


def test_reads_its_config_at_each_call():
    layer = SketchedLinear(8, 4, config=CONFIG)
    layer.config = SketchConfig(dim=3)
    kept = saved_storages(lambda: layer(torch.randn(10, 8)))
    assert 3 * 8 * 4 in kept.values()


def test_a_replica_of_data_parallel_keeps_a_sketch_too():
    """nn.DataParallel gives its replicas copies of the parameters that are plain tensors, not parameters."""
    layer = SketchedLinear(8, 4, config=CONFIG)
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = layer.weight.clone(), layer.bias.clone()
    assert 5 * 8 * 4 in saved_storages(lambda: replica(torch.randn(10, 8))).values()

"""The inputs that activation checkpointing keeps, in few bits where the user asks for it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backsketch import RestConfig, saved_memory, sketch_

ROWS, FEATURES = 64, 128
VALUES = ROWS * FEATURES


class Blocks(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def step(model, x):
    torch.manual_seed(1)
    own = x.clone().requires_grad_()
    with saved_memory(model) as saved:
        out = model(own * 1.0)
    kept = saved.activations
    out.square().sum().backward()
    return out.detach(), own.grad, kept


@pytest.mark.parametrize("reentrant", [False, True])
def test_inputs_of_checkpoints_are_packed_only_on_request(reentrant):
    x = torch.randn(ROWS, FEATURES)
    _, _, before = step(Blocks(reentrant), x)
    plain = sketch_(Blocks(reentrant), where=lambda name, module: False, rest=True)
    out, grad, kept = step(plain, x)
    assert kept == before
    packed = sketch_(Blocks(reentrant), where=lambda name, module: False, rest=RestConfig(checkpoint=8))
    packed_out, packed_grad, packed_kept = step(packed, x)
    assert packed_kept < 0.3 * before
    assert torch.equal(packed_out, out)
    # The recomputation starts from rounded values: precise, not exact.
    error = (packed_grad - grad).square().sum() / grad.square().sum()
    assert 0 < error < 1e-3
    assert step(Blocks(reentrant), x)[2] == before  # nothing stays switched on

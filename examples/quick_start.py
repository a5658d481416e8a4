"""Convert a model, train it, and convert it back: what is kept for backward falls, the loss does too."""

import torch
from torch import nn

import backsketch as bs

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
inputs = torch.randn(2048, 64)
targets = inputs[:, :8].sum(1, keepdim=True).sin()


def loss():
    return (model(inputs) - targets).square().mean()


def kept():
    with bs.saved_memory(model) as saved:
        graph = loss()  # alive, and with it what backward needs
        return saved.activations if graph.requires_grad else 0


exact = kept()
bs.sketch_(model)
print(bs.summary(model))
print(f"kept for backward: {exact / 2**20:.1f} MiB -> {kept() / 2**20:.1f} MiB")

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(31):
    value = loss()
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:2}: loss {value.item():.4f}")

bs.unsketch_(model)
print(type(model[0]).__name__, "again; names in the state_dict:", ", ".join(model.state_dict()))

"""Ask what a step keeps and where its peak is, then spend a budget where it costs the least noise."""

import torch
from torch import nn

import backsketch as bs

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 128), nn.GELU(), nn.Linear(128, 10)
)
batch = torch.randn(1024, 128)

found = bs.profile(model, batch, config=bs.SketchConfig.recommended())
print(found)  # the layer after ReLU cannot gain: ReLU keeps its own output, which that layer reads
print()

planned = bs.plan(model, batch, budget="15%")
print(planned)
bs.sketch_(model, planned)

try:
    bs.plan(model, batch, budget=100)
except ValueError as error:
    print(f"\nand a budget that cannot be met: {error}")

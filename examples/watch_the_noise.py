"""See while training how much noise each layer's sketch adds beside the noise that the batch brings anyway."""

import torch
from torch import nn

import backsketch as bs

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randn(4096, 32)
labels = data[:, :4].argmax(1)

for name, config in {
    "the paper's Gaussian": bs.SketchConfig(kind="gaussian", ratio=0.1),
    "rows": bs.SketchConfig(ratio=0.1),
    "ours in the same bytes": bs.SketchConfig.recommended(keep=0.1),
}.items():
    bs.sketch_(model, config)
    with bs.NoiseMonitor(model) as monitor:
        for start in range(0, 4096, 512):
            rows = slice(start, start + 512)
            nn.functional.cross_entropy(model(data[rows]), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"{name} ({config})\n{monitor}\n")
    bs.unsketch_(model)

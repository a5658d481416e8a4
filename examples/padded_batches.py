"""Leave padded rows out of the sketch: all kept rows are then tokens, and the noise falls."""

import torch
from torch import nn

import backsketch as bs

torch.manual_seed(0)
lengths = torch.randint(4, 33, (64,))
mask = torch.arange(32) < lengths.unsqueeze(1)  # (batch, length): a third and more is padding
layer = nn.Sequential(nn.Linear(48, 24, bias=False))
batch = torch.randn(64, 32, 48)
config = bs.SketchConfig(ratio=0.1)


def gradient():
    layer.zero_grad()
    loss = (layer(batch).square().mean(-1) * mask).sum()  # no gradient comes from padding: the caller's promise
    loss.backward()
    return layer[0].weight.grad


def noise(exact):
    return torch.stack([(gradient() - exact).square().sum() for _ in range(200)]).mean().item()


exact = gradient().clone()
bs.sketch_(layer, config)
without = noise(exact)
with bs.valid_rows(mask):  # models of transformers do this on their own with their attention_mask
    within = noise(exact)
print(f"{1 - mask.float().mean():.0%} padding, ratio {config.ratio}: squared error {without:.0f} -> {within:.0f}")
formula = (mask.float().mean() / 0.1 - 1) / (1 / 0.1 - 1)
print(f"{within / without:.2f} times the noise; by the formula {formula:.2f}")

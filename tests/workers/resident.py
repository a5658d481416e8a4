"""Print what a forward pass keeps by saved_memory, and by how much the resident memory of this process grew."""

import json
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import backsketch as bs

PAGE = os.sysconf("SC_PAGE_SIZE")
WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 256, 4, 4, 8, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.read, self.write = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        parts = self.read(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.write(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def main(way):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.randn(BATCH, LENGTH, WIDTH)
    if way == "rest":
        bs.sketch_(model, rest=True)
    for _ in range(2):  # what is made once: kernels, tables, gradients
        model(x).mean().backward()
    with bs.saved_memory(model) as saved:
        loss = model(x).mean()
        kept = saved.activations
    del loss
    before = resident()
    loss = model(x).mean()
    grown = resident() - before
    loss.backward()
    print(json.dumps({"kept": kept, "grown": grown, "left": resident() - before}))


if __name__ == "__main__":
    main(sys.argv[1])

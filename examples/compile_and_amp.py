"""Compile a converted model and run it under autocast: one graph, and what is saved is the sketch."""

import torch
from torch import nn

import backsketch as bs

torch.manual_seed(0)
first = nn.Linear(64, 256)
model = nn.Sequential(first, nn.GELU(), nn.Linear(256, 8))
bs.sketch_(model, bs.SketchConfig(ratio=0.25))
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # the default backend, inductor, needs a compiler
inputs, targets = torch.randn(512, 64), torch.randn(512, 8)

(compiled(inputs) - targets).square().mean().backward()
print("compiled, fp32:", first.weight.grad.norm().item())
model.zero_grad()

with torch.autocast("cpu", dtype=torch.float16):
    outputs = model(inputs)
(outputs.float() - targets).square().mean().backward()
print("autocast to", outputs.dtype, ":", first.weight.grad.norm().item(), first.weight.grad.dtype)
model.zero_grad()

draws = []
for _ in range(300):
    (compiled(inputs) - targets).square().mean().backward()
    draws.append(first.weight.grad.clone())
    model.zero_grad()
bs.unsketch_(model)
(model(inputs) - targets).square().mean().backward()
exact = first.weight.grad.clone()
mean = torch.stack(draws).mean(0)
print(f"mean of 300 compiled gradients, projected on the exact one: {(mean * exact).sum() / exact.square().sum():.2f}")

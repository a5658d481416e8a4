"""The stationary loss of SGD and Adam on a quadratic with known noise: exact, sketched, sketched with NoiseSchedule.

Linear regression with one design X of ±1 with XᵀX = B·I, and targets with fresh noise of variance 1 in every step.
The gradient is then exactly W − W* plus noise, every output is a chain of its own, and the stationary loss is known.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import backsketch as bs

WAYS = ("exact", "sketched", "scheduled")
OPTIMIZERS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}


def measure(
    *,
    way: str,
    optimizer: str,
    rate: float,
    ratio: float,
    rows: int,
    inputs: int,
    chains: int,
    steps: int,
    burn_in: int,
    seed: int,
) -> dict[str, Any]:
    """Train from the minimum on; return the mean excess loss of a chain, its standard error, and theory for SGD."""
    torch.manual_seed(seed)
    x = _design(rows, inputs)
    layer = nn.Linear(inputs, chains, bias=False)
    nn.init.zeros_(layer.weight)
    if way != "exact":
        bs.sketch_(layer, bs.SketchConfig(ratio=ratio))
    chosen = OPTIMIZERS[optimizer](layer.parameters(), lr=rate)
    schedule = None
    if way == "scheduled":
        schedule = bs.NoiseSchedule(chosen, bs.NoiseMonitor(layer, every=10))
    total = torch.zeros(chains, dtype=torch.float64)
    curve: list[float] = []
    for step in range(burn_in + steps):
        error = layer(x) - torch.randn(rows, chains)
        (error.square().sum() / (2 * rows)).backward()
        chosen.step()
        chosen.zero_grad()
        if schedule is not None:
            schedule.step()
        excess = layer.weight.detach().double().square().sum(1) / 2
        if step >= burn_in:
            total += excess
        if step % max(1, (burn_in + steps) // 200) == 0:
            curve.append(float(excess.mean()))
    if schedule is not None:
        schedule.monitor.stop()
    mean = total / steps
    factor = 1.0 if schedule is None else schedule.factors[0]
    return {
        "excess": float(mean.mean()),
        "standard_error": float(mean.std() / math.sqrt(chains)),
        "theory": stationary_excess(way, rate, ratio, rows, inputs) if optimizer == "SGD" else None,
        "rate_factor": factor,
        "curve": curve,
    }


def stationary_excess(way: str, rate: float, ratio: float, rows: int, inputs: int) -> float:
    """Return E‖w − w*‖² / 2 of SGD, exactly: m = (1 − η)² m + η² (v + q (v + c m)).

    v = N_in / B is the noise of the batch; rows add q = 1/ρ − 1 times D²_SGD, which is v + c m with
    c = (N_in − 1) / (B − 1), since rows also differ in what W − W* makes of them.
    """
    added = 0.0 if way == "exact" else 1 / ratio - 1
    rate = rate / (1 + added) if way == "scheduled" else rate
    noise, spread = inputs / rows, (inputs - 1) / (rows - 1)
    return 0.5 * rate * (1 + added) * noise / (2 - rate - rate * added * spread)


def _design(rows: int, inputs: int) -> Tensor:
    """Return some columns of a Hadamard matrix: entries ±1, XᵀX = rows · I."""
    matrix = torch.ones(1, 1)
    while len(matrix) < rows:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    if len(matrix) != rows or inputs >= rows:
        raise ValueError(f"rows must be a power of two above inputs, got {rows} rows and {inputs} inputs")
    return matrix[:, 1 : inputs + 1].contiguous()

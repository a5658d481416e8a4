"""The self-test: check that a sketched layer's output, ∂X and ∂b are exact here, and that its ∂W is unbiased."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import SketchConfig
from ..linear.algorithm import sketched_linear
from ..sketches import SKETCHES
from .config_text import in_words

ROWS, FEATURES, OUTPUTS, DRAWS = 64, 32, 16, 200
PACKED_ROWS = 1200  # enough for the fused kernel
ALLOWED = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the test for one config on one device.

    Attributes:
        wrong: which of output, ∂X and ∂b are not those of F.linear.
        mean, standard_error: of ⟨Ĝ, G⟩ / ‖G‖² over the draws, with Ĝ the sketched and G the true weight gradient:
            1 if Ĝ is unbiased.
    """

    config: str
    device: str
    wrong: tuple[str, ...]
    mean: float
    standard_error: float

    @property
    def deviation(self) -> float:
        """Return how many standard errors the mean is off."""
        off = abs(self.mean - 1)
        return off / self.standard_error if self.standard_error else math.inf

    @property
    def ok(self) -> bool:
        return not self.wrong and self.deviation <= ALLOWED


def configs() -> list[SketchConfig]:
    """Return one config for each kind, and the recommended one."""
    return [*(SketchConfig(kind=kind, ratio=0.25) for kind in SKETCHES), SketchConfig.recommended()]


def self_test(devices: list[str]) -> Iterator[Finding]:
    """Yield a finding for every device and config, with a fixed seed; torch's generator is restored."""
    for device in devices:
        for config in configs():
            with _one_thread(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                found = _try(config, device)
            yield found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: with such small tensors, several threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _try(config: SketchConfig, device: str) -> Finding:
    rows = ROWS if config.bits is None else PACKED_ROWS
    x, weight, bias = torch.randn(rows, FEATURES), torch.randn(OUTPUTS, FEATURES), torch.randn(OUTPUTS)
    y = torch.randn(rows, OUTPUTS) + 0.5
    x, weight, bias, y = (tensor.to(device) for tensor in (x, weight, bias, y))
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    out = F.linear(*leaves)
    exact = (out, *torch.autograd.grad(out, leaves, y))
    gradient = exact[2].cpu().double()
    wrong: dict[str, None] = {}
    shares = []
    for _ in range(DRAWS):
        out = sketched_linear(x, weight, bias, config)
        found = (out, *torch.autograd.grad(out, leaves, y))
        for name, place in (("output", 0), ("∂X", 1), ("∂b", 3)):
            if not _same(found[place], exact[place]):
                wrong[name] = None
        shares.append(float((found[2].cpu().double() * gradient).sum() / gradient.square().sum()))
    draws = torch.tensor(shares, dtype=torch.float64)
    return Finding(in_words(config), device, tuple(wrong), float(draws.mean()), float(draws.std()) / DRAWS**0.5)


def _same(one: Tensor, other: Tensor) -> bool:
    """Compare bit for bit on a CPU, and roughly on an accelerator, which may use another kernel."""
    return torch.equal(one, other) if one.device.type == "cpu" else torch.allclose(one, other, rtol=1e-4, atol=1e-4)

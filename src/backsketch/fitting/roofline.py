"""Estimate the time of a step on an accelerator from its kernels: a roofline, never run.

A kernel takes the longest of a launch, its bytes at the memory's bandwidth, and its flops at the rate of dense matrix
products. Kernels run one after another. Caches, the shape of a product and whatever else keeps a kernel from its
limit are left out. Products of fp32 tensors are taken at the rate of TF32, as torch computes them when
``torch.backends.cuda.matmul.allow_tf32`` is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .launch_counter import Kernel

LAUNCH = 5e-6  # seconds: about what torch takes to launch one small kernel after another


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The published limits of a device."""

    bandwidth: float  # bytes a second
    half: float  # dense flops a second in bf16
    single: float  # the same in TF32
    source: str

    def seconds(self, kernels: Sequence[Kernel]) -> float:
        """Estimate the time of kernels that run one after another."""
        return sum(self._seconds(kernel) for kernel in kernels)

    def _seconds(self, kernel: Kernel) -> float:
        rate = self.half if kernel.dtype in (torch.bfloat16, torch.float16) else self.single
        return max(LAUNCH, kernel.bytes / self.bandwidth, kernel.flops / rate)


ACCELERATORS = {
    "A100": Accelerator(2039e9, 312e12, 156e12, "NVIDIA A100 Tensor Core GPU data sheet, SXM 80GB"),
    "H100": Accelerator(3350e9, 989e12, 494e12, "NVIDIA H100 Tensor Core GPU data sheet, SXM, without sparsity"),
}

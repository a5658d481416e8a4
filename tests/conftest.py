"""What all tests share."""

import os

# Some CPUs announce bf16 matrix instructions that their host does not run; oneDNN then dies on the first bf16 GEMM.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

torch.set_num_threads(1)  # the tests' tensors are small, and waiting threads make a busy machine crawl


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _told_of_checkpoints(monkeypatch):
    """The warning that a sketch inside a checkpoint saves little comes once in a process; here, where it is tested."""
    from backsketch.linear import checkpointing

    monkeypatch.setattr(checkpointing, "_warned", True)

"""Fourier sketch: the discrete Fourier transform in real form (cosines, then sines)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .law import IDENTITY, Mirror
from .orthonormal import OrthonormalSketch


class Fourier(OrthonormalSketch):
    """S from the real orthonormal DFT: outputs 0 … height/2 are cosines, the others sines."""

    __slots__ = ()

    @classmethod
    def mirrors(cls, height: int) -> tuple[Mirror, ...]:
        if height <= 2:
            return ()  # at this size it is the Hadamard transform
        if height % 2:
            return IDENTITY, (-1, 0)
        return IDENTITY, (1, height // 2), (-1, 0), (-1, height // 2)

    @classmethod
    def transform(cls, x: Tensor, chosen: Tensor) -> Tensor:
        height = x.shape[-1]
        spectrum = torch.fft.rfft(x, norm="ortho")
        sine = chosen > height // 2
        values = spectrum.index_select(-1, torch.where(sine, height - chosen, chosen))
        alone = (chosen == 0) | (2 * chosen == height)  # these two frequencies have no sine
        scale = x.new_full(chosen.shape, math.sqrt(2.0)).masked_fill_(alone, 1.0)
        return torch.where(sine, values.imag, values.real) * scale

    @classmethod
    def matrix(cls, height: int, device: torch.device) -> Tensor:
        everything = torch.arange(height, device="cpu")
        identity = torch.eye(height, dtype=torch.float64, device="cpu")  # not every device has fp64
        return cls.transform(identity, everything).t().to(torch.float32).to(device)

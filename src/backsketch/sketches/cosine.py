"""Cosine sketch: the discrete cosine transform (DCT-II), by one real FFT."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .law import IDENTITY, Mirror
from .orthonormal import OrthonormalSketch


class Cosine(OrthonormalSketch):
    """S from the orthonormal DCT-II."""

    __slots__ = ()

    @classmethod
    def mirrors(cls, height: int) -> tuple[Mirror, ...]:
        return IDENTITY, (-1, height - 1)

    @classmethod
    def transform(cls, x: Tensor, chosen: Tensor) -> Tensor:
        height = x.shape[-1]
        # Makhoul 1980: even samples forward, odd ones backward, make a DCT out of an FFT of the same length.
        spectrum = torch.fft.rfft(torch.cat((x[:, ::2], x[:, 1::2].flip(-1)), dim=-1))
        mirrored = chosen > height // 2
        values = spectrum.index_select(-1, torch.where(mirrored, height - chosen, chosen))
        angle = chosen.to(x.dtype) * (math.pi / (2 * height))
        imaginary = torch.where(mirrored, -angle.sin(), angle.sin())
        scale = x.new_full(chosen.shape, math.sqrt(2 / height)).masked_fill_(chosen == 0, math.sqrt(1 / height))
        out: Tensor = (values.real * angle.cos() + values.imag * imaginary) * scale
        return out

    @classmethod
    def matrix(cls, height: int, device: torch.device) -> Tensor:
        output = torch.arange(height, dtype=torch.float64, device="cpu").unsqueeze(1)  # not every device has fp64
        sample = torch.arange(height, dtype=torch.float64, device="cpu") + 0.5
        basis = torch.cos(output * sample * (math.pi / height)).mul_(math.sqrt(2 / height))
        basis[0] *= math.sqrt(0.5)
        return basis.to(torch.float32).to(device)

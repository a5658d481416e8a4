"""Draws: the random numbers of one sketch, in the order in which it asks for them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..random_words import CHOICE_STREAM, SKETCH_STREAM, Seed, order_words, random_words
from ..seeds import generator_at
from .smallest import places_of_smallest


class Draws:
    """Random numbers of several kinds from a seed. Two with the same seed give the same to the same calls."""

    def __init__(self, seed: Seed, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._position = 0
        self._generator: torch.Generator | None = None

    def signs(self, count: int) -> Tensor:
        """Return ``count`` independent fp32 values of ±1: bit i of the words, the lowest first, is sign i."""
        shifts = torch.arange(8, dtype=torch.uint8, device=self._device)
        octets = self._words(-(-count // 32)).to(torch.int32).view(torch.uint8)
        bits = octets.unsqueeze(1).bitwise_right_shift(shifts).bitwise_and_(1)
        return bits.view(-1)[:count].to(torch.float32).mul_(2).sub_(1)

    def keys(self, count: int) -> Tensor:
        """Return a different random number below 2⁶³ for each of ``count`` places, to order them by."""
        return (self._words(count) << 31) | torch.arange(count, device=self._device)

    def choice(self, count: int, places: int, among: Tensor | None = None) -> Tensor:
        """Return ``count`` of the places at random, without replacement: (count,).

        Those that are ``among``, (places,) bool, come before all others. Each call gives the same.
        """
        keys = order_words(self._seed, CHOICE_STREAM, places, self._device)
        if among is not None:
            keys = (keys >> 1).add_(torch.where(among, -(2**62), 2**62))
        return places_of_smallest(keys, count)

    def orders(self, count: int, height: int) -> Tensor:
        """Return ``count`` independent random orders of ``height`` things: (count, height)."""
        return self.keys(count * height).view(count, height).argsort(dim=1)

    def normal(self, count: int) -> Tensor:
        """Return ``count`` independent normal fp32 values. They come from a generator of torch's, so devices differ."""
        if self._device.type == "meta":
            return torch.empty(count, device=self._device)
        if self._generator is None:
            self._generator = generator_at(int(self._seed), self._device)
        return torch.randn(count, generator=self._generator, device=self._device, dtype=torch.float32)

    def _words(self, count: int) -> Tensor:
        words = random_words(self._seed, SKETCH_STREAM, self._position, count, self._device)
        self._position += count
        return words

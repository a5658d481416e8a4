"""What a record says of each layer: the noise of rounding all its rows, and how far its outliers reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backsketch.config import STORED_BITS

from .layer_noise import LayerNoise


def layer_records(noises: Sequence[LayerNoise]) -> Mapping[str, Mapping[str, float]]:
    """Return name -> D² / D²_SGD of all rows in each number of bits, rotated or not, and ``largest``.

    ``largest`` is the largest value of the input in units of its root mean square.
    """
    return {each.name: {name: float(f"{value:.4g}") for name, value in _numbers(each).items()} for each in noises}


def _numbers(layer: LayerNoise) -> dict[str, float]:
    ways = [(bits, rotate) for bits in STORED_BITS for rotate in (False, True)]
    rounding = {f"{bits} bits{' rotated' * rotate}": layer.rounding(bits, rotate) / layer.sgd for bits, rotate in ways}
    return {**rounding, "largest": float(layer.x.abs().max() / layer.x.square().mean().sqrt())}

"""Points: what may be chosen for layers that share an input, with the bytes and the noise of each choice."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from ..argument_checks import check_flag
from ..config import STORED_BITS, SketchConfig
from ..convert.left_exact import narrow_reason
from ..memory.ledger import Ledger
from ..sketches import SKETCHES
from .layer_noise import CallNoise, Storage
from .spending import Point

RATIOS = (0.001, 0.002, 0.005, *(step / 100 for step in range(1, 101)))
ALL_BITS = (None, *STORED_BITS)


def layer_points(
    model: nn.Module,
    part: Sequence[str],
    ledger: Ledger,
    base: SketchConfig,
    storages: Collection[Storage],
    noise: Mapping[str, Sequence[CallNoise]],
) -> Iterator[Point[SketchConfig | None]]:
    """Yield the choices for the layers of ``part``: exact, or sketched with any config that saves bytes.

    Configs for which one of the layers is too narrow are left out, as ``sketch_`` would refuse them. Of rotated rows
    and others, which take the same bytes, only those with less noise are looked at.
    """
    calls = [call for name in part for call in noise[name]]
    quietest = dict(sorted(storages, key=lambda storage: -sum(call.rounding[storage] for call in calls)))
    configs = [
        replace(base, ratio=ratio, dim=None, bits=bits, rotate=rotate)
        for ratio in RATIOS
        for bits, rotate in quietest.items()
    ]
    layers = [model.get_submodule(name) for name in part]
    own = ledger.without_other_layers(part)
    exact = own.released(dict.fromkeys(part, configs[0]))
    yield Point(None, exact, 0.0)
    for config in configs:
        chosen = dict.fromkeys(part, config)
        size = exact - own.released(chosen) + own.sketches(chosen)
        if size < exact and not any(narrow_reason(layer, config) for layer in layers):
            yield Point(config, size, sum(call.under(config) for call in calls))


def planned_bits(bits: Collection[int | None] | None, config: SketchConfig) -> Collection[int | None]:
    """Return the values of ``bits`` that a plan may choose from: those given, or else those that ``config`` allows."""
    if bits is None:
        bits = (config.bits,) if SKETCHES[config.kind].mixes_rows or config.bits is not None else ALL_BITS
    if not isinstance(bits, Collection) or not bits or any(each not in ALL_BITS for each in bits):
        raise ValueError(f"bits must be some of {ALL_BITS}, got {bits!r}")
    if SKETCHES[config.kind].mixes_rows and set(bits) != {None}:
        raise ValueError(f"bits must be (None,) for kinds that mix rows, got {bits!r} for {config.kind!r}")
    return bits


def storages_of(bits: Collection[int | None], config: SketchConfig, rotate: bool | None) -> list[Storage]:
    """List the ways to store rows that may be planned."""
    if rotate is not None:
        check_flag("rotate", rotate)
        if rotate and set(bits) == {None}:
            raise ValueError("rotate=True needs bits: rows stored as they are have no rounding to lower")
        ways: tuple[bool, ...] = (rotate,)
    else:
        ways = (False, True) if config.bits is None else (config.rotate,)
    return [(each, way) for each in bits for way in ((False,) if each is None else ways)]

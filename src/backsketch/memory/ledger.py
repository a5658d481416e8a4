"""The ledger: which linear layers made autograd keep which storages, and who else holds them."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from ..config import SketchConfig
from ..linear.keeping import kept_bytes

Chosen: TypeAlias = Mapping[str, SketchConfig]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a linear layer that keeps its input: what it read, and the storages it made autograd hold.

    Where padded rows are left out, ``mask`` says by which mask: sketches under it keep it, one byte a row, once.
    ``held`` tells that the operation that made the input keeps it: then a sketched layer keeps it too, and no sketch.
    """

    layer: str
    source: Hashable
    storages: frozenset[int]
    rows: int
    in_features: int
    itemsize: int
    mask: Hashable = None
    held: bool = False

    def drops_input(self, chosen: Chosen) -> bool:
        """Tell whether this call lets go of its input: its layer is sketched and its input not kept as it is."""
        config = chosen.get(self.layer)
        return config is not None and not (self.held or config.keeps_input(self.rows))

    def kept_under(self, config: SketchConfig) -> int:
        """Return what it keeps beside its input: a sketch and its seed, or nothing where the input itself is kept."""
        if self.held or config.keeps_input(self.rows):
            return 0
        return kept_bytes(config, self.rows, self.in_features, self.itemsize)


@dataclass(frozen=True)
class Ledger:
    """What one forward pass of the exact model keeps for backward, its parameters and buffers apart.

    Attributes:
        sizes: storage -> bytes.
        others: storage -> names of the modules that hold it for reasons of their own.
        calls: every call of a linear layer that keeps its input, in order.
    """

    sizes: Mapping[int, int]
    others: Mapping[int, tuple[str, ...]]
    calls: tuple[Call, ...]

    @property
    def kept(self) -> int:
        """Return the bytes that the exact model keeps."""
        return sum(self.sizes.values())

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """List the sets of layers that read the same tensor, and so share one sketch under one config."""
        readers: dict[Hashable, dict[str, None]] = {}
        for call in self.calls:
            readers.setdefault(call.source, {})[call.layer] = None
        return tuple(dict.fromkeys(tuple(layers) for layers in readers.values() if len(layers) > 1))

    def calls_of(self, layer: str) -> Iterator[Call]:
        """Yield the calls of one layer."""
        return (call for call in self.calls if call.layer == layer)

    def kept_under(self, chosen: Chosen) -> int:
        """Return the bytes that the model keeps once the ``chosen`` layers are converted."""
        masks = {call.mask: call.rows for call in self.calls if call.mask is not None and call.drops_input(chosen)}
        return self.kept - self.released(chosen) + self.sketches(chosen) + sum(masks.values())

    def released(self, chosen: Chosen) -> int:
        """Return the bytes of today that nobody holds any more once the ``chosen`` layers are converted."""
        held = {key for call in self.calls if not call.drops_input(chosen) for key in call.storages}
        dropped = {key for call in self.calls if call.drops_input(chosen) for key in call.storages}
        return sum(self.sizes.get(key, 0) for key in dropped - held if not self.others.get(key))

    def sketches(self, chosen: Chosen) -> int:
        """Return the bytes that the sketches of the ``chosen`` layers add: one for each input and config."""
        sketches = {(call.source, chosen[call.layer]): call for call in self.calls if call.layer in chosen}
        return sum(call.kept_under(config) for (_, config), call in sketches.items())

    def holders(self, layer: str, chosen: Chosen) -> tuple[str, ...]:
        """Name whoever still holds an input of ``layer`` once the ``chosen`` layers are converted."""
        keys = {key for call in self.calls_of(layer) for key in call.storages}
        others = [name for key in sorted(keys) for name in self.others.get(key, ())]
        exact = [call.layer for call in self.calls if keys & call.storages and not call.drops_input(chosen)]
        return tuple(name for name in dict.fromkeys([*others, *exact]) if name != layer)

    def unpaid(self, chosen: Chosen) -> dict[str, str]:
        """Return layer -> reason for every ``chosen`` layer whose conversion would not lower the bytes kept."""
        reasons = {}
        for part in self.parts(chosen):
            if self.released(part) <= self.sketches(part):
                for layer in part:
                    held_by = ", ".join(self.holders(layer, chosen))
                    reasons[layer] = (
                        f"its input is held anyway by {held_by}" if held_by else "a sketch is no smaller than its input"
                    )
        return reasons

    def only_inputs(self, layers: Container[str]) -> set[int]:
        """Return the storages that are inputs of ``layers`` and that nobody else holds."""
        theirs = {key for call in self.calls if call.layer in layers for key in call.storages}
        others = {key for call in self.calls if call.layer not in layers for key in call.storages}
        return {key for key in theirs - others if key in self.sizes and not self.others.get(key)}

    def held_elsewhere(self, layers: Container[str]) -> dict[str, int]:
        """Return name -> bytes of all that is kept beside the inputs of ``layers`` alone, each for its first holder."""
        readers = {
            key: call.layer for call in reversed(self.calls) if call.layer not in layers for key in call.storages
        }
        held: dict[str, int] = {}
        for key in self.sizes.keys() - self.only_inputs(layers):
            name = (*self.others.get(key, ()), readers.get(key, ""))[0]
            held[name] = held.get(name, 0) + self.sizes[key]
        return held

    def split_groups(self, chosen: Chosen) -> tuple[tuple[str, ...], ...]:
        """List the groups of which some layers are ``chosen`` and others are not, or under another config."""
        return tuple(group for group in self.groups if len({chosen.get(layer) for layer in group}) > 1)

    def parts(self, chosen: Chosen) -> list[dict[str, SketchConfig]]:
        """Split ``chosen`` into the smallest sets of layers with neither a storage nor an input in common."""
        parts: list[tuple[set[Hashable], dict[str, SketchConfig]]] = []
        for call in self.calls:
            if call.layer not in chosen:
                continue
            ties: set[Hashable] = {call.layer, call.source, *call.storages}
            layers = {call.layer: chosen[call.layer]}
            for part in [part for part in parts if part[0] & ties]:
                parts.remove(part)
                ties, layers = part[0] | ties, part[1] | layers
            parts.append((ties, layers))
        return [layers for _, layers in parts]

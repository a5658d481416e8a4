"""The ledger: which operations made autograd keep which storages, and what a conversion would change."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..config import SketchConfig
from .claims import Chosen, Claim, LinearClaim


@dataclass(frozen=True)
class Ledger:
    """What one forward pass of the exact model keeps for backward, its parameters and buffers apart.

    Attributes:
        sizes: storage -> bytes.
        claims: why they are kept, in the order of saving; those of linear layers that keep their input come last.
    """

    sizes: Mapping[int, int]
    claims: tuple[Claim, ...]

    @cached_property
    def calls(self) -> tuple[LinearClaim, ...]:
        """List the claims of linear layers that keep their input, in order."""
        return tuple(claim for claim in self.claims if isinstance(claim, LinearClaim))

    @cached_property
    def others(self) -> dict[int, tuple[str, ...]]:
        """Return storage -> who holds it beside linear layers that keep their input."""
        holders: dict[int, dict[str, None]] = {}
        for claim in self._other_claims():
            for key in claim.storages:
                holders.setdefault(key, {})[claim.holder] = None
        return {key: tuple(names) for key, names in holders.items()}

    @cached_property
    def hooked(self) -> frozenset[str]:
        """Name the holders for which hooks keep something else, and that hold no input as it is."""
        return frozenset(claim.holder for claim in self.claims if claim.replaced) - {call.layer for call in self.calls}

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

    def calls_of(self, layer: str) -> Iterator[LinearClaim]:
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
        reasons = dict.fromkeys(self.hooked & chosen.keys(), "hooks on saved tensors keep its input in their own way")
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

    def held_elsewhere(self, layers: Container[str]) -> Iterator[tuple[Claim, int]]:
        """Yield all that is kept beside the inputs of ``layers`` alone: the first claim of a storage, and its bytes."""
        readers = (call for call in self.calls if call.layer not in layers)
        first: dict[int, Claim] = {}
        for claim in (*self._other_claims(), *readers):
            for key in claim.storages:
                first.setdefault(key, claim)
        return ((first[key], self.sizes[key]) for key in self.sizes.keys() - self.only_inputs(layers))

    def without_other_layers(self, layers: Container[str]) -> Ledger:
        """Return the ledger as if no linear layer but ``layers`` kept its input."""
        return replace(self, claims=(*self._other_claims(), *(call for call in self.calls if call.layer in layers)))

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

    def _other_claims(self) -> Iterator[Claim]:
        return (claim for claim in self.claims if not isinstance(claim, LinearClaim))

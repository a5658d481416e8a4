"""Kinds of layers: a layer and its counterparts in the other blocks of a model make one line of a report."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..memory.profile_result import LayerProfile, Profile
from ..table import together


@dataclass(frozen=True, slots=True)
class Kind:
    """A layer and its counterparts in other blocks, and the bytes of all of them.

    Layers that read one input form one kind, and their bytes count once. ``reason`` is why a sketch cannot pay.
    """

    name: str
    blocks: int
    input_bytes: int
    sketch_bytes: int
    reason: str


def kinds_of(found: Profile) -> list[Kind]:
    """Return the kinds of layers that keep anything, in the model's order."""
    order = {layer.name: place for place, layer in enumerate(found.layers)}
    alike: dict[tuple[str, str], dict[tuple[str, ...], LayerProfile]] = {}
    for layer in found.layers:
        if layer.calls:
            group = tuple(sorted((layer.name, *layer.shares_with), key=order.__getitem__))
            name = together(list(dict.fromkeys(map(short, group))))
            alike.setdefault((name, "" if layer.pays else short(layer.note)), {})[group] = layer
    return [
        Kind(
            name=name,
            blocks=len(groups),
            input_bytes=_bytes_held(found, {member for group in groups for member in group}),
            sketch_bytes=sum(layer.sketch_bytes for layer in groups.values()),
            reason=reason,
        )
        for (name, reason), groups in alike.items()
    ]


def other_bytes(found: Profile) -> int:
    """Return the bytes kept for backward that are not inputs of linear layers."""
    return found.kept_before - _bytes_held(found, (layer.name for layer in found.layers))


def exclusions(found: Profile) -> list[str] | None:
    """Return globs that match the layers where a sketch cannot pay, and no other; None if there are no such globs."""
    paying = set(found.pays)
    rest = [layer.name for layer in found.layers if layer.name not in paying]
    globs = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in rest))
    return None if any(fnmatchcase(name, glob) for glob in globs for name in paying) else globs


def short(text: str) -> str:
    """Write * for the number of a block and drop what stands before: "model.layer.7.output" -> "layer.*.output"."""
    return re.sub(r"(?:\w+\.)*?(\w+)\.\d+(?=[.\s,]|$)", r"\1.*", text)


def _bytes_held(found: Profile, layers: Iterable[str]) -> int:
    members = set(layers)
    storages = {key for call in found.ledger.calls if call.layer in members for key in call.storages}
    return sum(found.ledger.sizes.get(key, 0) for key in storages)

"""Profile: the result of profiling one training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..config import SketchConfig
from ..rest.rest_config import RestConfig
from ..table import Table, change, readable, short, starred
from .claims import Chosen
from .family_profile import FamilyProfile
from .ledger import Ledger
from .live_storages import ACTIVATIONS, TRANSIENTS, Peak, Place
from .remedies import remedies

_NAMED = 3  # of those who hold what no sketch reaches: the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One linear layer in one step.

    Attributes:
        calls: how often it ran and kept its input; rows: B over all of these.
        input_bytes: the storages that autograd holds because of it, each once.
        held_by: who else would hold them all the same: then a sketch cannot pay.
        shares_with: layers that read the same tensor: with one config they keep one sketch between them.
        config: what it would be converted with, or None if it is not selected.
        sketch_bytes: what it would keep instead, together with all layers that share its sketch.
        pays: whether converting it lowers the bytes kept; note: why not.
    """

    name: str
    calls: int
    rows: int
    in_features: int
    input_bytes: int
    held_by: tuple[str, ...]
    shares_with: tuple[str, ...]
    config: SketchConfig | None
    sketch_bytes: int
    pays: bool
    note: str


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A training step before conversion, and after converting those of the selected layers that pay.

    Attributes:
        layers: one record for each linear layer that can be converted.
        ledger: who holds what; it answers for any other choice of layers and configs.
        chosen: the config of every selected layer.
        kept_before, kept_after: bytes held for backward, parameters apart.
        kept_if_all: the same if the selected layers were converted also where it does not pay.
        peak_before, peak_after: the peak of forward and backward.
        rest: in how many bits all else is kept after conversion; None if it stays as it is.
        families: what each family of operations other than sketched layers keeps, before and after.
        language_models: the modules that compute a loss of logits; can_fuse: whether ``fuse_loss_`` takes them.
    """

    layers: tuple[LayerProfile, ...]
    ledger: Ledger
    chosen: Chosen
    kept_before: int
    kept_after: int
    kept_if_all: int
    peak_before: Peak
    peak_after: Peak
    rest: RestConfig | None = None
    families: tuple[FamilyProfile, ...] = ()
    language_models: tuple[str, ...] = ()
    can_fuse: bool = False

    @property
    def pays(self) -> tuple[str, ...]:
        """Name the selected layers whose conversion lowers the bytes kept."""
        return tuple(layer.name for layer in self.layers if layer.pays)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """List the sets of layers that read the same tensor."""
        return self.ledger.groups

    @property
    def reached(self) -> float:
        """Return which share of the bytes kept for backward are inputs that the selected layers alone hold."""
        inputs = sum(self.ledger.sizes[key] for key in self.ledger.only_inputs(self.chosen))
        return inputs / max(self.kept_before, 1)

    @property
    def elsewhere(self) -> tuple[tuple[str, int], ...]:
        """List who holds the rest, and its bytes: modules alike in all blocks together, the largest first."""
        held = _added((claim.holder, size) for claim, size in self.ledger.held_elsewhere(self.chosen))
        groups: dict[str, list[str]] = {}
        for name in held:
            groups.setdefault(starred(name), []).append(name)
        return _largest_first(
            (pattern if len(names) > 1 else names[0], sum(held[name] for name in names))
            for pattern, names in groups.items()
        )

    @property
    def operations(self) -> tuple[tuple[str, int], ...]:
        """List which operations saved the rest, and its bytes, the largest first; "" where torch does not show it."""
        saved = _added((claim.operation, size) for claim, size in self.ledger.held_elsewhere(self.chosen))
        return _largest_first(saved.items())

    def unpaid(self, chosen: Chosen) -> dict[str, str]:
        """Return layer -> reason for every layer that would keep no less if the ``chosen`` layers were converted."""
        return self.ledger.unpaid(chosen)

    def split_groups(self, chosen: Chosen) -> tuple[tuple[str, ...], ...]:
        """List the groups that would not keep just one sketch if the ``chosen`` layers were converted."""
        return self.ledger.split_groups(chosen)

    @property
    def loss_bytes(self) -> int:
        """Return the bytes of logits and loss at the peak.

        They are what the last linear layer's forward, a language model, the whole model itself or no module made.
        """
        return sum(
            size
            for item, size in self.peak_before.live.items()
            if item.role in (ACTIVATIONS, TRANSIENTS) and item.place is not None and self._is_of_loss(item.place)
        )

    def _is_of_loss(self, place: Place) -> bool:
        by_last = place.phase == "forward" and bool(self.layers) and place.module == self.layers[-1].name
        return place.module in (None, "", *self.language_models) or by_last

    @property
    def loss_in_words(self) -> str:
        """Say what ``loss_bytes`` are of."""
        others = "the last layer's output and what the model computes itself, such as a loss"
        return "the logits and their loss" if self.language_models else others

    @property
    def _fusing(self) -> str:
        """Say what fuses the loss."""
        alone = "backsketch.linear_cross_entropy(hidden, weight, target), if that is a cross-entropy"
        return "backsketch.fuse_loss_(model)" if self.can_fuse else alone

    @property
    def lowers_peak(self) -> bool:
        """Tell whether the peak falls by a hundredth or more: less is not worth the noise."""
        return self.peak_after.total <= 0.99 * self.peak_before.total

    @property
    def remedies(self) -> tuple[str, ...]:
        """Name what else would lower the peak, what it could free most of first."""
        fused = f"a fused loss ({readable(self.loss_bytes)} are {self.loss_in_words}): {self._fusing}"
        return remedies(self.peak_before, self.loss_bytes, fused)

    @property
    def advice(self) -> str | None:
        """Say that sketching does not lower the peak, or what would lower it more, if anything would."""
        if not self.lowers_peak:
            return "this sketch does not lower the peak; what would: " + "; ".join(self.remedies)
        share = self.loss_bytes / max(self.peak_before.total, 1)
        if share >= 0.1 and self.loss_bytes > self.peak_before.total - self.peak_after.total:
            return (
                f"at the loss: {readable(self.loss_bytes)} ({share:.0%}) of the peak are {self.loss_in_words}; "
                f"a fused loss would help more: {self._fusing}"
            )
        return None

    def to_records(self) -> list[dict[str, Any]]:
        """Return one plain dict for each layer."""
        return [asdict(layer) for layer in self.layers]

    def table(self) -> Table:
        """Return the layers and totals as a table."""
        titles = ("layer", "rows", "input", "sketch", "reads with", "verdict")
        rows = tuple(
            (
                layer.name or "(the model)",
                str(layer.rows),
                readable(layer.input_bytes),
                readable(layer.sketch_bytes) if layer.config else "-",
                ", ".join(short(name, layer.name) for name in layer.shares_with) or "-",
                "pays" if layer.pays else layer.note,
            )
            for layer in self.layers
        )
        notes = (self.advice,) if self.advice else ()
        return Table(titles, rows, notes, numeric=frozenset({1, 2, 3}), heads=tuple(self._totals()))

    def print_table(self) -> None:
        """Print the table, fitted to the terminal where rich is installed."""
        self.table().show()

    def __str__(self) -> str:
        return str(self.table())

    def __rich__(self) -> Any:
        return self.table().__rich__()

    def _totals(self) -> Iterator[str]:
        yield f"peak: {change(self.peak_before.total, self.peak_after.total)}"
        yield f"  at: {self.peak_before.place}"
        yield "  of it: " + ", ".join(
            f"{role} {readable(size)}" for role, size in self.peak_before.parts.items() if size
        )
        yield f"kept for backward: {change(self.kept_before, self.kept_after)}"
        if self.kept_if_all != self.kept_after:
            yield f"  if all selected layers were converted: {change(self.kept_before, self.kept_if_all)}"
        yield f"  of it inputs of the selected layers alone: {self.reached:.1%}"
        for family in self.families:
            yield f"  {family.name}: {change(family.before, family.after)}"
        if not self.families and (
            most := [f"{name} ({size / self.kept_before:.1%})" for name, size in self.elsewhere[:_NAMED]]
        ):
            yield f"  most of the rest is held by {', '.join(most)}"


def _added(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for name, size in parts:
        total[name] = total.get(name, 0) + size
    return total


def _largest_first(sizes: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(sizes, key=lambda each: (-each[1], each[0])))

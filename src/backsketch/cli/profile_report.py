"""What ``backsketch profile`` prints: the memory of a training step, under several configs, and the best of them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..config import SketchConfig
from ..memory.live_storages import Peak
from ..memory.optimizer_states import OPTIMIZERS
from ..memory.profile_result import Profile
from ..table import Table, readable
from .config_text import as_code, in_words, noise_in_words
from .layer_groups import exclusions, kinds_of, other_bytes, short
from .step_ways import StepWay, best_way


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The memory of a training step of one model under several configs.

    Attributes:
        about: the model's name, architecture and number of parameters; batch, seq, dtype and device of the step, the
            batch also in words, and where the dtype comes from: ``--dtype``, the model's ``config`` or ``default``.
        profiles: the profile of the config that was asked for, then those of configs to compare it with.
        preferred: the one of them that is recommended if it lowers the peak.
        states: optimiser -> the bytes of its states.
        optimizer: that of them whose states come on top of the peak.
        ways: the step in other ways too, exact first; failed: why some could not be measured.
    """

    about: Mapping[str, Any]
    profiles: Mapping[SketchConfig, Profile]
    preferred: SketchConfig
    states: Mapping[str, int]
    optimizer: str = "adamw"
    ways: tuple[StepWay, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def config(self) -> SketchConfig:
        return next(iter(self.profiles))

    @property
    def found(self) -> Profile:
        return self.profiles[self.config]

    @property
    def best(self) -> SketchConfig | None:
        """Return the preferred config if it lowers the peak, else the first that does, else None."""
        return next((each for each in (self.preferred, *self.profiles) if self.profiles[each].lowers_peak), None)

    @property
    def best_way(self) -> StepWay | None:
        """Return the way that is recommended, if one lowers the peak."""
        return best_way(self.ways)

    def show(self) -> None:
        """Print the report: the total first, then what it is made of."""
        about = self.about
        dtype = f"{about['dtype']} ({_DTYPE_FROM[about['dtype_from']]})"
        _print(f"{about['model']}: {about['architecture']}, {_count(about['parameters'])} parameters, {dtype}")
        for line in self.totals():
            _print(line)
        tables = (self.way_table(), self.family_table(), self.layer_table(), self.choice_table())
        for table in (table for table in tables if table.rows):
            print()
            table.show()
        print()
        for note in self.notes():
            _print(note)

    def totals(self) -> Iterator[str]:
        """Yield what the exact step needs and what the recommended way needs, and what the first is made of."""
        found, states = self.found, self.states[self.optimizer]
        needed = found.peak_before.total + states
        total = f"One training step on {self.about['examples']} keeps {readable(found.kept_before)} for backward"
        total += f" and needs {readable(needed)} at its peak"
        if (best := self.best_way) is not None:
            total += f"; as recommended below, {_compared(best.peak.total + states, needed)}"
        yield f"{total}."
        name = OPTIMIZERS[self.optimizer].name
        parts = {**found.peak_before.parts, f"{name}'s states": states}
        named = ", ".join(f"{part} {readable(size)}" for part, size in parts.items() if size)
        yield f"The exact peak is in {short(str(found.peak_before.place)).rpartition(' (')[0]}: {named}."
        if found.loss_bytes >= _WORTH * found.peak_before.total:
            remedy = ": bs.fuse_loss_(model) makes them some rows at a time" if any(w.fused for w in self.ways) else ""
            yield f"{readable(found.loss_bytes)} of it are {found.loss_in_words}{remedy}."

    def way_table(self) -> Table:
        """Return a row for each way to run the step: what it keeps, and its peak with optimiser states."""
        if not self.ways:
            return Table((), ())
        states = self.states[self.optimizer]
        exact, *others = [(each.name, each.kept, each.peak.total + states) for each in self.ways]
        rows = [(exact[0], *map(readable, exact[1:]))]
        rows += [(name, _compared(kept, exact[1]), _compared(peak, exact[2])) for name, kept, peak in others]
        return Table(("", "kept for backward", "peak"), tuple(rows), numeric=frozenset({1, 2}))

    def family_table(self) -> Table:
        """Return what ``rest`` keeps in few bits, before and after: in all, and for each family of operations."""
        sizes = [
            (each.name, each.before, each.after) for each in next((way.families for way in self.ways if way.rest), ())
        ]
        if sizes:
            sizes.insert(0, ("in all", sum(before for _, before, _ in sizes), sum(after for *_, after in sizes)))
        rows = tuple((name, readable(before), _compared(after, before)) for name, before, after in sizes)
        return Table(("what rest keeps", "before", "after"), rows, numeric=frozenset({1, 2}))

    def layer_table(self) -> Table:
        """Return all that is kept, a row for each kind of layer under the first config, and why some cannot pay."""
        kinds = kinds_of(self.found)
        rows = tuple(
            (
                kind.name,
                str(kind.blocks),
                readable(kind.input_bytes),
                f"{kind.input_bytes / self.found.kept_before:.1%}",
                "no gain" if kind.reason else readable(kind.sketch_bytes),
            )
            for kind in kinds
        )
        rest = other_bytes(self.found)
        total = ("all operations", "", readable(self.found.kept_before), "100.0%", "")
        rows = (total, *rows, ("all else", "", readable(rest), f"{rest / self.found.kept_before:.1%}", ""))
        why = (f"no gain in {kind.name}: {kind.reason}" for kind in kinds if kind.reason)
        notes = ("×: how many there are. of all: the share of all that is kept for backward.", *why)
        return Table(("kept by", "×", "bytes", "of all", "sketched"), rows, notes, frozenset({1, 2, 3, 4}))

    def choice_table(self) -> Table:
        """Return a row for the exact model and for each config: linear inputs, all kept for backward, and the peak."""
        found = self.found
        inputs = max(linear_inputs(each)[0] for each in self.profiles.values())
        states = self.states[self.optimizer]
        exact = (inputs, found.kept_before, found.peak_before.total + states)
        rows = [("exact", *map(readable, exact))]
        for config, each in sorted(self.profiles.items(), key=lambda item: -item[1].kept_after):
            released, sketches = linear_inputs(each)
            sizes = (inputs - released + sketches, each.kept_after, each.peak_after.total + states)
            rows.append((in_words(config), *map(_compared, sizes, exact)))
        return Table(("", "linear inputs", "kept for backward", "peak"), tuple(rows), numeric=frozenset({1, 2, 3}))

    def notes(self) -> Iterator[str]:
        """Yield what the optimiser keeps, and what is recommended with its noise, or what would lower the peak."""
        chosen = OPTIMIZERS[self.optimizer]
        states = readable(self.states[self.optimizer])
        yield f"{chosen.name} keeps {states}: {chosen.words}. Every peak includes them."
        yield from (f"{problem}." for problem in self.failed)
        if (way := self.best_way) is not None:
            yield "\nRecommended:\n  import backsketch as bs"
            yield from self._way_call(way)
            if way.sketched and (price := noise_in_words(self.best or self.preferred)) is not None:
                yield price
            if way.rest:
                yield "What rest adds to the noise is not counted there."
            return
        if self.best is None:
            yield f"\nRecommended: no sketch. {self._none_lowers()}"
            yield from (f"- {remedy}" for remedy in self.found.remedies)
            return
        if self.found.lowers_peak and self.found.advice:
            yield f"The peak of forward and backward is {self.found.advice}."
        yield "\nRecommended:\n  import backsketch as bs"
        yield from self._call(self.best)
        if (price := noise_in_words(self.best)) is not None:
            yield price

    def record(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        first, *others = ({"config": asdict(config), **_sizes(found)} for config, found in self.profiles.items())
        return {
            **self.about,
            **first,
            "adamw_bytes": self.states["adamw"],
            "optimizer": self.optimizer,
            "optimizer_bytes": self.states[self.optimizer],
            "logits_bytes": self.found.loss_bytes,
            "ways": [_way(each) for each in self.ways],
            "not_measured": list(self.failed),
            "recommended_way": None if self.best_way is None else _way(self.best_way),
            "advice": self.found.advice,
            "layers": self.found.to_records(),
            "others": others,
            "recommended": None if self.best is None else asdict(self.best),
        }

    def _none_lowers(self) -> str:
        found = "None of these configs lowers" if len(self.profiles) > 1 else "This config does not lower"
        peak = readable(self.found.peak_before.total)
        return f"{found} the peak of forward and backward by 1% or more. What would, of its {peak}:"

    def _way_call(self, way: StepWay) -> Iterator[str]:
        """Yield the lines of Python that convert a model in a way."""
        if way.fused:
            yield "  bs.fuse_loss_(model)"
        if way.sketched:
            yield from self._call(self.best or self.preferred, ", rest=True" if way.rest else "")
        elif way.rest:
            yield '  bs.sketch_(model, {"*": None}, rest=True)'

    def _call(self, best: SketchConfig, rest: str = "") -> Iterator[str]:
        """Yield the lines of Python that convert a model with the recommended config, where that pays."""
        globs, config = exclusions(self.profiles[best]), f"bs.{as_code(best)}"
        if globs is None:
            yield f"  config = {config}"
            yield f"  bs.sketch_(model, config, profile=bs.profile(model, **batch, config=config){rest})"
        elif globs:
            yield "  bs.sketch_(model, {"
            yield from (f'      "{glob}": None,' for glob in globs)
            yield f'      "*": {config},'
            yield f"  }}{rest})"
        else:
            yield f"  bs.sketch_(model, {config}{rest})"


_DTYPE_FROM = {
    "--dtype": "as --dtype says",
    "config": "as the model's config states",
    "default": "by default: the model's config states none",
}


_WORTH = 0.05  # logits of a smaller share of the peak are not worth a word


def _way(way: StepWay) -> dict[str, Any]:
    families = {each.name: {"before": each.before, "after": each.after} for each in way.families}
    return {"name": way.name, "kept": way.kept, "peak": _peak(way.peak), "families": families}


def linear_inputs(found: Profile) -> tuple[int, int]:
    """Return what the linear inputs that a sketch can reduce keep today, and what they would keep."""
    paying = {name: found.chosen[name] for name in found.pays}
    return found.ledger.released(paying), found.ledger.sketches(paying)


def _sizes(found: Profile) -> dict[str, Any]:
    before, after = linear_inputs(found)
    return {
        "linear_inputs": {"before": before, "after": after},
        "kept": {"before": found.kept_before, "after": found.kept_after, "if_all": found.kept_if_all},
        "peak": {"before": _peak(found.peak_before), "after": _peak(found.peak_after)},
    }


def _peak(peak: Peak) -> dict[str, Any]:
    return {"total": peak.total, "parts": peak.parts, "place": None if peak.place is None else str(peak.place)}


def _compared(size: int, exact: int) -> str:
    return f"{readable(size)} {size / exact - 1:+.0%}" if exact else readable(size)


def _count(number: int) -> str:
    units = (("B", 1e9), ("M", 1e6), ("K", 1e3))
    return next((f"{number / size:.1f} {unit}" for unit, size in units if number >= size), str(number))


def _print(text: str) -> None:
    lines = text.split("\n")
    print("\n".join(textwrap.fill(line, min(shutil.get_terminal_size().columns, 100)) for line in lines))

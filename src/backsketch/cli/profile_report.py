"""What ``backsketch profile`` prints: the memory of a training step, under several configs, and the best of them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..config import SketchConfig
from ..memory.live_storages import Peak
from ..memory.profile_result import Profile
from ..table import Table, readable
from .config_text import as_code, in_words, noise_in_words
from .layer_groups import exclusions, kinds_of, other_bytes, short


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The memory of a training step of one model under several configs.

    Attributes:
        about: the model's name, architecture and number of parameters; batch, seq, dtype and device of the step, the
            batch also in words, and where the dtype comes from: ``--dtype``, the model's ``config`` or ``default``.
        profiles: the profile of the config that was asked for, then those of configs to compare it with.
        preferred: the one of them that is recommended if it lowers the peak.
    """

    about: Mapping[str, Any]
    profiles: Mapping[SketchConfig, Profile]
    preferred: SketchConfig

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

    def show(self) -> None:
        """Print the report."""
        about, found = self.about, self.found
        dtype = f"{about['dtype']} ({_DTYPE_FROM[about['dtype_from']]})"
        _print(f"{about['model']}: {about['architecture']}, {_count(about['parameters'])} parameters, {dtype}")
        _print(f"One training step on {about['examples']} keeps {readable(found.kept_before)} for backward.\n")
        self.layer_table().show()
        print()
        self.choice_table().show()
        print()
        for note in self.notes():
            _print(note)

    def layer_table(self) -> Table:
        """Return a row for each kind of layer under the first config, and notes on why some cannot pay."""
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
        rows += (("all else", "", readable(rest), f"{rest / self.found.kept_before:.1%}", ""),)
        notes = tuple(f"no gain in {kind.name}: {kind.reason}" for kind in kinds if kind.reason)
        return Table(("linear layers", "×", "input", "of all", "sketch"), rows, notes, frozenset({1, 2, 3, 4}))

    def choice_table(self) -> Table:
        """Return a row for the exact model and for each config: linear inputs, all kept for backward, and the peak."""
        found = self.found
        inputs = max(linear_inputs(each)[0] for each in self.profiles.values())
        exact = (inputs, found.kept_before, found.peak_before.total)
        rows = [("exact", *map(readable, exact))]
        for config, each in sorted(self.profiles.items(), key=lambda item: -item[1].kept_after):
            released, sketches = linear_inputs(each)
            sizes = (inputs - released + sketches, each.kept_after, each.peak_after.total)
            rows.append((in_words(config), *map(_compared, sizes, exact)))
        return Table(("", "linear inputs", "kept for backward", "peak"), tuple(rows), numeric=frozenset({1, 2, 3}))

    def notes(self) -> Iterator[str]:
        """Yield where the peak is, and the recommended config with its noise, or what would lower the peak instead."""
        peak = self.found.peak_before
        parts = ", ".join(f"{name} {readable(size)}" for name, size in peak.parts.items() if size)
        yield f"The exact peak is in {short(str(peak.place)).rpartition(' (')[0]}: {parts}."
        states = readable(self._adamw_bytes)
        yield f"It counts forward and backward; AdamW's states come on top: {states}, less with an 8-bit AdamW."
        if self.best is None:
            yield f"\nRecommended: no sketch. {self._none_lowers()}"
            yield from (f"- {remedy}" for remedy in self.found.remedies)
            return
        if self.found.lowers_peak and self.found.advice:
            yield f"The peak is {self.found.advice}."
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
            "adamw_bytes": self._adamw_bytes,
            "advice": self.found.advice,
            "layers": self.found.to_records(),
            "others": others,
            "recommended": None if self.best is None else asdict(self.best),
        }

    def _none_lowers(self) -> str:
        found = "None of these configs lowers" if len(self.profiles) > 1 else "This config does not lower"
        peak = readable(self.found.peak_before.total)
        return f"{found} the peak of the step by 1% or more. What would, of its {peak}:"

    def _call(self, best: SketchConfig) -> Iterator[str]:
        """Yield the lines of Python that convert a model with the recommended config, where that pays."""
        globs, config = exclusions(self.profiles[best]), f"bs.{as_code(best)}"
        if globs is None:
            yield f"  config = {config}"
            yield "  bs.sketch_(model, config, profile=bs.profile(model, **batch, config=config))"
        elif globs:
            yield "  bs.sketch_(model, {"
            yield from (f'      "{glob}": None,' for glob in globs)
            yield f'      "*": {config},'
            yield "  })"
        else:
            yield f"  bs.sketch_(model, {config})"

    @property
    def _adamw_bytes(self) -> int:
        size: int = 2 * self.about["parameter_bytes"]
        return size


_DTYPE_FROM = {
    "--dtype": "as --dtype says",
    "config": "as the model's config states",
    "default": "by default: the model's config states none",
}


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

"""The demo's table, 80 columns wide, from the record of its results alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...table import Table
from .contenders import EXACT

BUSY = 0.9  # on a quiet machine, steps run for more than this share of the time
TITLES = ("way to train", "linear MiB", "kept MiB", "peak MiB", "time", "noise", "loss")


def result_table(results: Mapping[str, Any]) -> Table:
    """Return a row for each contender, and notes on what the columns mean and which promises are met."""
    contenders = results["contenders"]
    rows = tuple(_row(entry, contenders[EXACT]) for entry in contenders.values())
    notes = ("", *_configs(contenders), *_notes(results), "", *_promises(results), *_busy(results))
    return Table(TITLES, rows, notes, numeric=frozenset(range(1, len(TITLES))))


def _row(entry: Mapping[str, Any], exact: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        entry["name"],
        *(_bytes(entry[part], exact[part]) for part in ("linear_bytes", "kept_bytes", "peak_bytes")),
        "-" if entry["speed"] is None else f"{1 / entry['speed']:.2f}",
        "-" if entry["noise"] is None else f"{entry['noise']:.2f}",
        "-" if entry["validation_loss"] is None else _loss(entry, exact),
    )


def percent_above(share: float) -> str:
    """Write how far a loss lies above another one; zero never gets a minus sign."""
    return f"{round(share, 3) + 0.0:+.1%}"


def _bytes(size: int, exact: int) -> str:
    return f"{size / 2**20:.3g} {size / exact:4.0%}"


def _loss(entry: Mapping[str, Any], exact: Mapping[str, Any]) -> str:
    above = " " * 6 if entry is exact else f"{percent_above(entry['loss_above_exact']):>6}"
    return f"{entry['validation_loss']:.3f} {above}"


def _configs(contenders: Mapping[str, Any]) -> Iterator[str]:
    for entry in contenders.values():
        if entry["config"] is not None:
            kind, ratio, bits = (entry["config"][name] for name in ("kind", "ratio", "bits"))
            stored = "as they are" if bits is None else f"in {bits} bits"
            rest = ", and all else in few bits" if entry["rest"] else ""
            yield f"{entry['name']}: kind {kind}, ratio {ratio:.3g}, stored {stored}{rest}"


def _notes(results: Mapping[str, Any]) -> Iterator[str]:
    yield "linear: MiB kept for backward only for linear layers: their inputs, or sketches."
    yield f"  Exact training keeps {results['linear_share']:.0%} of its bytes for them. Attention, GELU and layer"
    yield "  norms keep the rest, which only the whole step and checkpointing change."
    yield "peak: the most MiB in memory at once, with weights, gradients, AdamW's states."
    yield "time: of a step, relative to an exact one on the same batch; median of all."
    yield "noise: variance that sketches add to ∂W, relative to SGD's own; mean of layers."
    yield f"loss: nats a byte on held-out files after {results['steps']} steps, and how far above exact."


def _promises(results: Mapping[str, Any]) -> Iterator[str]:
    marks = {True: "met   ", False: "MISSED", None: "open  "}
    for promise in results["promises"]:
        yield "  ".join((marks[promise["met"]], promise["text"], promise["shown"])).rstrip()


def _busy(results: Mapping[str, Any]) -> Iterator[str]:
    share = results["own_share"]
    if share is not None and share < BUSY:
        yield f"This machine was busy: steps ran {share:.0%} of the time and waited otherwise. The"
        yield "  times say little; please try again when nothing else runs."

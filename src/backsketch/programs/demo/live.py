"""What the demo shows while it trains: on a terminal a live table, elsewhere a line now and then."""

from __future__ import annotations

import statistics
from itertools import pairwise
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .training import Lane, Race

_LINES = 10  # in all, where there is no terminal
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 30


class View:
    """Show the progress of a race on stderr; ``quiet`` shows nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        """Say what the demo is doing."""
        if self._console.is_terminal:
            self._live.update(Text(f"{text} …"))
        else:
            self._console.print(text, highlight=False, soft_wrap=True)

    def show(self, race: Race) -> None:
        """Show the state of all lanes."""
        if self._console.is_terminal:
            self._live.update(_picture(race))
        elif race.steps == 1 or race.steps % max(1, race.scale.steps // _LINES) == 0:
            losses = ", ".join(f"{lane.contender.name} {lane.losses[-1]:.3f}" for lane in race.lanes)
            self._console.print(f"step {race.steps} of {race.scale.steps}: {losses}", highlight=False, soft_wrap=True)


def _picture(race: Race) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for title, justify in (("way to train", "left"), ("training loss", "right"), ("", "left"), ("ms a step", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    first, last = race.exact.losses[0], min(min(lane.losses) for lane in race.lanes)
    for lane in race.lanes:
        time = f"{1000 * statistics.median(lane.seconds):.0f}"
        table.add_row(lane.contender.name, f"{lane.losses[-1]:.3f}", _sparkline(lane, first, last), time)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(race.scale.steps, race.steps, width=40), f"step {race.steps} of {race.scale.steps}, one of each way"
    )
    return Group(table, "", bar)


def _sparkline(lane: Lane, first: float, last: float) -> str:
    """Draw the losses as bars of equally many steps each, scaled between the first and the lowest loss."""
    count = min(_WIDTH, len(lane.losses))
    edges = [round(part * len(lane.losses) / count) for part in range(count + 1)]
    means = [statistics.fmean(lane.losses[start:end]) for start, end in pairwise(edges)]
    height = max(first - last, 1e-9)
    return "".join(_BARS[max(0, min(7, int(8 * (mean - last) / height)))] for mean in means)

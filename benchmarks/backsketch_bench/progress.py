"""Progress on stderr, and only on a terminal: stdout is for results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")


def progress() -> Progress:
    """Return a progress display that vanishes when it is done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def track(items: Iterable[Item], title: str, total: int) -> Iterator[Item]:
    """Yield the items and show how many are done."""
    with progress() as display:
        yield from display.track(items, description=title, total=total)

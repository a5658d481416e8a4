"""Tables of text: with rich where it is installed, and plain otherwise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """Titles and rows of cells, with lines of text above and below; ``numeric`` columns are set flush right."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    numeric: frozenset[int] = frozenset()
    heads: tuple[str, ...] = ()

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.titles, *self.rows, strict=True)]
        lines = [self._line(row, widths) for row in (self.titles, *self.rows)]
        return "\n".join([*self._above(), lines[0], "-" * len(lines[0]), *lines[1:], *self.notes])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=None, pad_edge=False)
        for index, title in enumerate(self.titles):
            table.add_column(title, justify="right" if index in self.numeric else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return Group(*map(Text, self._above()), table, *map(Text, self.notes))

    def show(self) -> None:
        """Print the table, fitted to the terminal where rich is installed."""
        try:
            from rich import print as rich_print
        except ImportError:
            print(self)
        else:
            rich_print(self.__rich__())

    def _above(self) -> tuple[str, ...]:
        return (*self.heads, "") if self.heads else ()

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = (
            cell.rjust(width) if index in self.numeric else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()


def readable(size: float) -> str:
    """Write a number of bytes with a binary unit: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def change(before: int, after: int) -> str:
    """Write before -> after with the share saved: "1.0 MiB -> 0.8 MiB (-20.0%)"."""
    share = f" ({100 * (after - before) / before:+.1f}%)" if before else ""
    return f"{readable(before)} -> {readable(after)}{share}"


def short(name: str, reference: str) -> str:
    """Return ``name`` without its path if ``reference`` has the same path."""
    return name.rpartition(".")[2] if name.rpartition(".")[0] == reference.rpartition(".")[0] else name


def starred(name: str) -> str:
    """Write * for the numbers in a dotted name, which tell blocks apart: "layers.7.output" -> "layers.*.output".

    If all parts of a name are numbers, the last one stays: it tells the layers of one block apart.
    """
    parts = name.split(".")
    last = len(parts) - all(map(str.isdecimal, parts))
    return ".".join("*" if part.isdecimal() and place < last else part for place, part in enumerate(parts))


def starred_names(text: str) -> str:
    """Write * for the numbers in the dotted names of a sentence, and leave other numbers alone."""
    return re.sub(r"[\w.]*[^\W\d][\w.]*", lambda word: starred(word[0]), text)


def together(names: Sequence[str]) -> str:
    """Join names, and write the path that they share only once: "attention.query, key, value"."""
    return ", ".join([names[0], *(short(name, names[0]) for name in names[1:])])

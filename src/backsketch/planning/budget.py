"""A budget: a share of the bytes that linear inputs keep today, or a number of bytes."""

from __future__ import annotations

import re
from decimal import Decimal
from numbers import Integral, Real

from ..table import readable

DECIMAL = {unit: 1000**power for power, unit in enumerate(("kB", "MB", "GB", "TB"), 1)}
BINARY = {unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)}

_BYTES = {unit.lower(): size for unit, size in {"B": 1, **DECIMAL, **BINARY}.items()}


def as_budget(budget: object, name: str = "budget") -> int | float:
    """Return bytes as an int, a share as a float; ``name`` is that of the argument."""
    wrong = (
        f'{name} must be a share in (0, 1] ("50%" or 0.5), a positive number of bytes (an int) or one with a unit '
        f'("500 MB"; {", ".join((*DECIMAL, *BINARY))} or B), got {budget!r}'
    )
    if isinstance(budget, bool) or not isinstance(budget, (str, Real)):
        raise TypeError(wrong)
    value: int | float | None
    if isinstance(budget, str):
        value = _parse(budget)
    else:
        value = int(budget) if isinstance(budget, Integral) else float(budget)
    if value is None or not (value >= 1 if isinstance(value, int) else 0 < value <= 1):
        raise ValueError(wrong)
    return value


def too_small(name: str, asked: object, size: int, least: int, today: int, what: str) -> str:
    """Say that a budget is below the ``least`` that is possible; ``today`` is what there is, in ``what``."""
    share = f", {least / today:.1%} of the {readable(today)} {what}" if today else ""
    return f"{name} must be at least {readable(least)} ({least} bytes{share}): got {asked!r}, which is {readable(size)}"


def _parse(text: str) -> int | float | None:
    """Read "20%" as a share and "1.5 GB" as bytes, in upper or lower case; a bare number is ambiguous: None."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%|[a-z]+)\s*", text.lower(), re.ASCII)
    if match is None:
        return None
    if match[2] == "%":
        return float(match[1]) / 100
    return int(Decimal(match[1]) * _BYTES[match[2]]) if match[2] in _BYTES else None

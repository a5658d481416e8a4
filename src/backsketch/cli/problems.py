"""Problem: an error that the user sees as one line instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

USAGE, STOPPED = 2, 130


class Problem(Exception):  # noqa: N818 (the user sees its text, not its name)
    """One line for the user, and the exit code."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(" ".join(message.split()))
        self.code = code


@contextmanager
def users_mistakes() -> Iterator[None]:
    """Turn errors about wrong values into Problems; for code that checks arguments, before anything runs."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise Problem(str(error)) from error


def need(extra: str, *packages: str) -> None:
    """Raise a Problem that says what to install if a package of an extra is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise Problem(f"this needs {', '.join(missing)}: pip install 'backsketch[{extra}]'", code=1)

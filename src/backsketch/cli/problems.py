"""Problem: what a user is told in one line instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

USAGE, STOPPED = 2, 130


class Problem(Exception):  # noqa: N818 (told, not raised to the user)
    """One line for the user, and the exit code."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(" ".join(message.split()))
        self.code = code


@contextmanager
def users_mistakes() -> Iterator[None]:
    """Turn what is raised for a wrong value, while nothing runs yet, into a Problem."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise Problem(str(error)) from error


def need(extra: str, *packages: str) -> None:
    """Say what to install where a package of an extra is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise Problem(f"this needs {', '.join(missing)}: pip install 'backsketch[{extra}]'", code=1)

"""The command line: one file for each command. A user's mistake gives one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..programs.page_keeping import restart_keeping_pages
from .problems import STOPPED, Problem

TIMED = ("bench", "demo", "frontier")  # commands that compare the times of steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: the one that this process was started with, unless one is given."""
    if arguments is None and sys.argv[1:2] and sys.argv[1] in TIMED:
        restart_keeping_pages()
    try:
        from .app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        return _say(Problem(f"the command line needs {error.name}: pip install 'backsketch[cli]'", code=1))
    try:
        return run(sys.argv[1:] if arguments is None else list(arguments))
    except Problem as problem:
        return _say(problem)
    except KeyboardInterrupt:
        return _say(Problem("stopped", code=STOPPED))


def _say(problem: Problem) -> int:
    print(f"backsketch: {problem}", file=sys.stderr)
    return problem.code

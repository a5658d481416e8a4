"""The command line through its real entry point, and what every mistake looks like."""

import os
import subprocess
import sys
from pathlib import Path

import backsketch
from backsketch.cli import main

ROOT = Path(__file__).parent.parent
PACKAGES = (Path(backsketch.__file__).parents[1], ROOT / "benchmarks")


def python(*arguments, cwd=None, **changes):
    """Run a fresh Python with the packages of this checkout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PACKAGES)), **changes}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=environment)


def call(*arguments, cwd=None, **changes):
    """Run a command in a process of its own."""
    return python("-m", "backsketch", *arguments, cwd=cwd, **changes)


def check_mistake(arguments, message, capsys):
    """Hold that a wrong call ends with exit code 2 and one line that tells why, on stderr."""
    assert main(list(arguments)) == 2
    shown = capsys.readouterr()
    assert not shown.out
    lines = [line for line in shown.err.splitlines() if line.startswith("backsketch: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in shown.err

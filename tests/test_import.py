"""Importing is light: torch and the standard library, nothing else."""

import subprocess
import sys

PROBE = """
import sys
import torch
before = set(sys.modules)
{extra}
import backsketch
allowed = set(sys.stdlib_module_names) | {{"torch", "backsketch"}}
print(sorted({{name.split(".")[0] for name in set(sys.modules) - before}} - allowed))
"""


def imported(extra=""):
    run = subprocess.run([sys.executable, "-c", PROBE.format(extra=extra)], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_import_brings_torch_and_the_standard_library_only():
    assert imported() == "[]"


def test_the_probe_sees_a_foreign_import():
    assert "hypothesis" in imported("import hypothesis")

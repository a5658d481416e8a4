"""Importing is light: torch and the standard library, nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import backsketch

SOURCES = Path(backsketch.__file__).parent
ABOVE = {"backsketch_bench": {"cli/bench.py", "cli/frontier.py"}}  # package -> who may import it, inside a function

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


def test_the_command_line_brings_typer_and_rich_but_nothing_heavy():
    brought = imported("import backsketch.cli.app")
    assert "typer" in brought
    assert not any(name in brought for name in ("transformers", "matplotlib", "numpy", "backsketch_bench", "sklearn"))


def test_the_probe_sees_a_foreign_import():
    assert "hypothesis" in imported("import hypothesis")


def imports(tree):
    """Return the packages that are imported, and how many functions deep."""
    found: set[tuple[str, int]] = set()

    def walk(node, depth):
        if isinstance(node, ast.Import):
            found.update((name.name.split(".")[0], depth) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module.split(".")[0], depth))
        for child in ast.iter_child_nodes(node):
            walk(child, depth + isinstance(node, ast.FunctionDef))

    walk(tree, 0)
    return found


def test_the_library_never_imports_what_builds_on_it():
    for path in SOURCES.rglob("*.py"):
        name = path.relative_to(SOURCES).as_posix()
        for package, depth in imports(ast.parse(path.read_text())):
            if package in ("backsketch_bench", "deflation", "deflated"):
                assert name in ABOVE.get(package, ()), name
                assert depth, name


def test_such_an_import_is_seen():
    code = "import backsketch_bench.speed\ndef run():\n    from backsketch_bench import frontier"
    assert imports(ast.parse(code)) == {("backsketch_bench", 0), ("backsketch_bench", 1)}

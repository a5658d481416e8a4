"""What is imported is declared: each package that a file imports is a dependency of what the file belongs to."""

import ast
import importlib.util
import re
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import pytest

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

NEW_IN_PYTHON_3_11 = {"tomllib"}
STANDARD = sys.stdlib_module_names - NEW_IN_PYTHON_3_11
OWN = {"backsketch", "backsketch_bench", *(path.stem for path in (ROOT / "experiments").iterdir())}
BROUGHT_BY = {  # module -> the distribution that installs it, where their names differ
    "click": "typer",
    "huggingface-hub": "transformers",
    "safetensors": "transformers",
    "tokenizers": "transformers",
    "sklearn": "scikit-learn",
    "tomllib": "tomli",
    "triton": "torch",  # where torch is built for a GPU
}
IF_IMPORTED = {"bitsandbytes"}  # used only where the user has imported it
EXTRAS = {  # the start of a path -> the extras that its files may need; the longest start counts
    "src/backsketch": set(),
    "src/backsketch/cli": {"cli"},
    "src/backsketch/cli/models.py": {"cli", "transformers"},
    "src/backsketch/programs/demo": {"cli"},
    "src/backsketch/programs/glue": {"transformers"},
    "src/backsketch/integrations/lightning.py": {"lightning"},
    "src/backsketch/integrations/lightning_plan.py": {"lightning"},
    "src/backsketch/integrations/transformers.py": {"transformers"},
    "src/backsketch/linear/conv1d.py": {"transformers"},
    "src/backsketch/convert/checkpointed_blocks.py": {"transformers"},
    "src/backsketch/convert/left_exact.py": {"peft"},
    "src/backsketch/fitting/groups.py": {"peft"},
    "src/backsketch/fitting/fit_figure.py": {"cli"},
    "src/backsketch/plots.py": {"cli"},
    "src/backsketch/table.py": {"cli"},
    "benchmarks": {"cli", "transformers"},
    "benchmarks/backsketch_bench/whole_step_subjects.py": {"transformers", "peft"},
    "examples": {"transformers", "lightning", "peft"},
    "experiments": {"test"},
    "tests": {"test"},
}
FILES = sorted(
    path
    for folder in ("src", "benchmarks", "examples", "experiments", "tests")
    for path in (ROOT / folder).rglob("*.py")
)


def distribution(requirement):
    return re.match(r"[\w.-]+", requirement).group().lower().replace("_", "-")


def declared(extras):
    """Return the distributions of the core and of some extras, and of those that they name in turn."""
    found = {distribution(requirement) for requirement in PROJECT["dependencies"]}
    for extra in extras:
        for requirement in PROJECT["optional-dependencies"][extra]:
            inner = re.match(r"backsketch\[(.*)\]", requirement)
            found |= declared(inner[1].split(",")) if inner else {distribution(requirement)}
    return found


def imported(tree):
    """Return the packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found


def undeclared(path, code, own=OWN):
    start = max((start for start in EXTRAS if f"{path}/".startswith(f"{start}/")), key=len)
    known = declared(EXTRAS[start])
    names = imported(ast.parse(code)) - STANDARD - own - IF_IMPORTED
    return {name for name in names if BROUGHT_BY.get(dashed := name.replace("_", "-"), dashed) not in known}


@pytest.mark.parametrize("folder", ["src", "benchmarks", "examples", "experiments", "tests"])
def test_every_import_is_declared(folder):
    beside = OWN | {path.stem for path in (ROOT / "tests").glob("*.py")}
    files = [path for path in FILES if path.is_relative_to(ROOT / folder)]
    assert files
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        assert not undeclared(name, path.read_text(encoding="utf-8"), beside if folder == "tests" else OWN), name


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        ("src/backsketch/config.py", "import os\nimport torch\nimport numpy", {"numpy"}),
        ("src/backsketch/programs/glue/folder.py", "def f():\n    from rich import print", {"rich"}),
        ("src/backsketch/cli/app.py", "import typer, transformers", {"transformers"}),
        ("experiments/grid.py", "import tomllib, vermin", {"vermin"}),
    ],
)
def test_an_import_that_is_not_declared_is_found(path, code, expected):
    assert undeclared(path, code) == expected


def test_what_needs_a_newer_python_is_declared_for_older_ones():
    (requirement,) = (each for each in PROJECT["optional-dependencies"]["test"] if each.startswith("tomli"))
    assert re.search(r"python_version < ['\"]3\.11['\"]", requirement)
    assert PROJECT["requires-python"] == ">=3.10"


def test_a_grid_is_read_without_tomllib(monkeypatch):
    monkeypatch.setitem(sys.modules, "tomli", tomllib)
    monkeypatch.setitem(sys.modules, "tomllib", None)
    spec: Any = importlib.util.spec_from_file_location("older_grid", ROOT / "experiments" / "grid.py")
    grid = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "older_grid", grid)
    spec.loader.exec_module(grid)
    assert grid.read_grid(ROOT / "experiments" / "grids" / "memory.toml")


# The pinned versions

PIN = re.compile(r"([\w.-]+)==(\S+)(?: ; python_version (<|>=) '3\.11')?")


def pins():
    """Return name -> marker -> version: the marker is None where one version serves all of Python 3.10 to 3.13."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, dict[str | None, str]] = {}
    for line in lines:
        if not line.startswith("#"):
            match = PIN.fullmatch(line)
            assert match, line
            name, version, marker = match.groups()
            assert marker not in found.setdefault(name, {}), line
            found[name][marker] = version
    return found


def test_every_python_has_one_version_of_a_package():
    for name, versions in pins().items():
        assert set(versions) in ({None}, {"<"}, {"<", ">="}), name


def test_a_version_that_serves_all_pythons_needs_none_newer_than_the_oldest():
    oldest = int(PROJECT["requires-python"].removeprefix(">=3."))
    checked = 0
    for name, versions in pins().items():
        try:
            installed = metadata(name)
        except PackageNotFoundError:
            continue
        if installed["Version"].split("+")[0] == versions.get(None):
            least = re.search(r">=\s*3\.(\d+)", installed["Requires-Python"] or ">=3.0")
            assert least is None or int(least.group(1)) <= oldest, name
            checked += 1
    assert checked or metadata("torch")["Version"].split("+")[0] != pins()["torch"][None]

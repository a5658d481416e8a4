"""Imports run one way: a part of the package imports only earlier parts, and the library imports no program."""

import ast
from pathlib import Path

import pytest

import backsketch

SOURCE = Path(backsketch.__file__).parent

# The parts of the package (folders and single files) in order. A part may import itself and the parts before it.
ORDER = [
    {"torch_private"},
    {
        "argument_checks",
        "autocasting",
        "garbage",
        "made_classes",
        "numerics",
        "random_words",
        "saved_as_it_is",
        "table",
        "tensor_storages",
    },
    {"cpu_library", "seeds", "sharded"},
    {"sketches"},
    {"storage"},
    {"config"},
    {"masks"},
    {"linear"},
    {"changed_forward"},
    {"rest"},
    {"losses"},
    {"convert"},
    {"noise"},
    {"memory"},
    {"monitor"},
    {"plots"},
    {"planning"},
    {"control"},
    {"fitting"},
    {"integrations"},
    {"programs"},
    {"cli"},
    {"__main__"},
]
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
PROGRAMS = {"programs", "cli", "__main__"}


def part_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(path, code):
    """Return the parts that a file imports at run time; imports for type checking alone do not count."""
    package = ("backsketch", *path.relative_to(SOURCE).parent.parts)
    found = set()
    for node in _run(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            names = [*start, *(node.module or "").split(".")] if node.module else list(start)
            targets = [names] if len(names) > 1 else [[*names, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        else:
            continue
        found |= {target[1] for target in targets if target[0] == "backsketch" and len(target) > 1}
    return {part for part in found if part in RANK}


def _run(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _run(child)


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


def test_every_part_is_in_the_order():
    assert {part_of(path) for path in FILES} == set(RANK)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_a_part_imports_only_earlier_parts(path):
    own = part_of(path)
    later = {part for part in imported_parts(path, path.read_text()) - {own} if RANK[part] >= RANK[own]}
    assert not later, f"{own} imports {later}, which do not come before it"


def test_the_public_names_need_no_program():
    parts = imported_parts(SOURCE / "__init__.py", (SOURCE / "__init__.py").read_text())
    assert parts
    assert not parts & PROGRAMS


def test_the_check_can_fail():
    path = SOURCE / "linear" / "algorithm.py"
    assert imported_parts(path, "from ..memory.peak import peak_memory") == {"memory"}
    assert imported_parts(path, "def f():\n    from ..programs import demo") == {"programs"}
    assert imported_parts(path, "from .. import noise") == {"noise"}
    assert imported_parts(path, "import backsketch.cli") == {"cli"}
    assert imported_parts(path, "if TYPE_CHECKING:\n    from ..memory.peak import peak_memory") == set()


@pytest.mark.parametrize("package", list(SOURCE.rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_no_module_is_hidden_by_a_function_of_its_name(package):
    modules = {path.stem for path in package.parent.glob("*.py")} | {
        path.name for path in package.parent.iterdir() if path.is_dir()
    }
    names = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(package.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert not modules & names


# What code looks through the stack with: it then depends on who calls it, and keeps alive what the caller holds.
FRAMES = {"_getframe", "_current_frames", "currentframe", "f_back", "f_locals", "f_globals", "stack", "tb_frame"}


def frame_names(code):
    """Return the names in a file that look through stack frames; torch.stack joins tensors."""
    attributes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
    imported = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    names = {each.attr for each in attributes if not (isinstance(each.value, ast.Name) and each.value.id == "torch")}
    names |= {alias.name for each in imported if each.module in ("inspect", "sys") for alias in each.names}
    return names & FRAMES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_file_looks_through_stack_frames(path):
    assert not frame_names(path.read_text())


def test_the_check_for_stack_frames_can_fail():
    assert frame_names("import sys\nsys._getframe(1).f_back") == {"_getframe", "f_back"}
    assert frame_names("from inspect import currentframe") == {"currentframe"}
    assert frame_names("inspect.stack()[1]") == {"stack"}
    assert frame_names("torch.stack([x])") == set()

"""The rooms inside the rooms: their order, their names, and maps that tell the truth."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure.test_laws import PACKAGE, ROOT, SOURCES, imports, names

MAX_FUNCTION_LINES = 60

CORE_FLOORS = (
    {
        "constraint",
        "request",
        "request_settings",
        "plan",
        "knobs",
        "events",
        "block_keys",
        "capacity",
        "embedding",
        "embedding_events",
        "peers",
    },
    {"tenancy"},
    {"sequence"},
    {"prediction", "prefix"},
    {"drafting"},
    {"queueing"},
    {"memory"},
    {"scheduler"},
    {"ports"},
    {"engine"},
)
"""Rooms and files of ``core``, lowest first: each imports from its own floor and those below it."""

ROOMS = sorted({path.parent for path in SOURCES})


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}


def runtime_imports(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports when it is loaded: not in functions, not under TYPE_CHECKING."""
    body = [
        node
        for node in ast.parse(path.read_text()).body
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    for name in imports(ast.Module(body=[n for n in body if not is_definition(n)], type_ignores=[]), path):
        if name in MODULES:
            yield name


def is_definition(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Every import circle that a depth-first walk closes."""
    done: set[str] = set()
    found: list[list[str]] = []

    def walk(name: str, road: list[str]) -> None:
        if name in road:
            found.append([*road[road.index(name) :], name])
        elif name not in done:
            for other in sorted(graph.get(name, ())):
                walk(other, [*road, name])
            done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return found


def floor_of(name: str) -> int | None:
    """The floor of a module of ``core``; None for anything else."""
    parts = name.split(".")
    if parts[:2] != ["headrace", "core"] or len(parts) < 3:
        return None
    return next(floor for floor, rooms in enumerate(CORE_FLOORS) if parts[2] in rooms)


def test_no_import_circles():
    assert not circles({name: set(runtime_imports(path)) - {name} for name, path in MODULES.items()})


def test_a_circle_would_be_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c", "a"]]
    assert not circles({"a": {"b", "c"}, "b": {"c"}})


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").rglob("*.py")), ids=names)
def test_no_arrow_in_core_points_up(path):
    own = floor_of(module_of(path))
    if own is None:
        return
    for name in imports(ast.parse(path.read_text()), path):  # also in functions and under TYPE_CHECKING
        other = floor_of(name) if name in MODULES else None
        assert other is None or other <= own, f"{module_of(path)} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("room", [room for room in ROOMS if room != PACKAGE], ids=names)
def test_each_package_has_a_map_of_its_files(room):
    """``__init__`` names every file and room beside it, in reading order, and none that is not there."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    there = {path.stem for path in room.glob("*.py")} - {"__init__", "__main__"}
    there |= {path.name for path in room.iterdir() if (path / "__init__.py").exists()}
    named = set(re.findall(r"`(\w+)`", text))
    assert there <= named, f"not on the map: {sorted(there - named)}"
    ghosts = set(re.findall(r"^- ((?:`\w+`(?:, | and )?)+):", text, re.MULTILINE))
    listed = {name for line in ghosts for name in re.findall(r"`(\w+)`", line)}
    assert listed <= there, f"on the map but not there: {sorted(listed - there)}"

"""The rooms inside the rooms: their order, their names, and maps that tell the truth."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.structure.test_laws import PACKAGE, ROOT, SOURCES, imports, names, nodes, parsed

MAX_FUNCTION_LINES = 60
SMALL = 4
"""Files of a package that needs no map."""

ROOMS = sorted({path.parent for path in SOURCES})


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}
PACKAGES = {module_of(path) for path in SOURCES if path.name == "__init__.py"}


def runtime_imports(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports when it is loaded: not in functions, not under TYPE_CHECKING."""
    body = [
        node
        for node in parsed(path).body
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


def test_no_import_circles():
    assert not circles({name: set(runtime_imports(path)) - {name} for name, path in MODULES.items()})


def test_a_circle_would_be_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c", "a"]]
    assert not circles({"a": {"b", "c"}, "b": {"c"}})


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Modules of the package that a file imports, also in functions and for types."""
    return tuple(name for name in imports(parsed(path), path) if name in MODULES)


def neighbours(package: str) -> dict[str, set[str]]:
    """What each file or folder of a package imports of those beside it: also in functions and for types."""
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if name.startswith(package + ".") and path.name != "__main__.py":
            own = name.removeprefix(package + ".").partition(".")[0]
            for other in imported(path):
                beside = other.removeprefix(package + ".").partition(".")[0]
                if other.startswith(package + ".") and beside != own:
                    graph.setdefault(own, set()).add(beside)
    return graph


def test_each_package_has_floors():
    """The files and folders of a package can be put in an order in which each imports only those before it."""
    packages = sorted(PACKAGES - {"headrace"})
    assert not [(package, closed) for package in packages if (closed := circles(neighbours(package)))]


def test_functions_are_short():
    assert not [
        f"{names(path)}: {node.name} has {length} lines"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def test_each_large_package_has_a_map_of_its_files():
    """``__init__`` names every file and folder beside it, in reading order, and none that is not there.

    A package of a few files needs no map.
    """
    for room in ROOMS:
        if room == PACKAGE:
            continue
        text = ast.get_docstring(parsed(room / "__init__.py")) or ""
        there = {path.stem for path in room.glob("*.py")} - {"__init__", "__main__"}
        there |= {path.name for path in room.iterdir() if (path / "__init__.py").exists()}
        named = set(re.findall(r"`(\w+)`", text))
        left = [] if len(there) <= SMALL else sorted(there - named)
        assert not left, f"not on the map of {names(room)}: {left}"
        ghosts = set(re.findall(r"^- ((?:`\w+`(?:, | and )?)+):", text, re.MULTILINE))
        listed = {name for line in ghosts for name in re.findall(r"`(\w+)`", line)}
        assert listed <= there, f"on the map of {names(room)} but not there: {sorted(listed - there)}"

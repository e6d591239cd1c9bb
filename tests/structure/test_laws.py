"""The five laws, read from the sources themselves."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "headrace"
SOURCES = sorted(PACKAGE.rglob("*.py"))

GROUND = {"expressions", "files", "plots"}
MAY_IMPORT = {
    "text": GROUND,
    "core": set(),
    "config": {"core"},
    "compute": {"core", "config"} | GROUND,
    "observe": {"core"} | GROUND,
    "service": {"core", "text", "config"} | GROUND,
    "response_cache": {"core", "service", "text", "config"} | GROUND,
    "response_cache/rules": {"core"},
    "tuning": {"core", "observe", "service"} | GROUND,
    "api": {"core", "response_cache", "service", "tuning", "text", "config"} | GROUND,
    "lab": {"core", "observe", "tuning"} | GROUND,
    "fleet": {"core", "compute", "service", "text", "config"},
    "files": set(),
    "plots": set(),
    "expressions": set(),
}
"""Rooms, and what each may import of the package beside itself; the roof may import everything."""

PURE = {"core", "response_cache/rules"}
"""Folders that use of the standard library only what is pure, and nothing from other packages."""

ROOF = {"wiring", "llm", "cli", "testing", "notebook", "__init__", "__main__"}
IMPURE = {"time", "random", "os", "io", "asyncio", "threading", "socket", "logging"}


@cache
def trees() -> dict[Path, ast.Module]:
    """All sources, parsed once for all laws; no law changes them. The collector would search a million nodes often."""
    gc.disable()
    found = {path: ast.parse(path.read_text()) for path in SOURCES}
    gc.freeze()
    gc.enable()
    return found


def parsed(path: Path) -> ast.Module:
    return trees()[path]


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(walk(parsed(path)))


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, in half the time."""
    yield node
    for name in node._fields:
        value = getattr(node, name, None)
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, ast.AST):
                yield from walk(each)


def room_of(path: Path) -> str:
    """The room of a file; a room's ``__main__`` is a program, which stands on the roof."""
    if path.name == "__main__.py":
        return "__main__"
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Every module that is imported anywhere in the file, also in functions and under TYPE_CHECKING."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Call) and is_import(node.func):
            yield ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else "computed"


def is_import(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id == "__import__"
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "import_module"
        and isinstance(function.value, ast.Name)
        and function.value.id == "importlib"
    )


def illegal_imports(tree: ast.Module, path: Path) -> list[str]:
    folder = next((pure for pure in PURE if path.is_relative_to(PACKAGE / pure)), room_of(path))
    own = folder.replace("/", ".") + "."
    wrong = []
    for name in imports(tree, path):
        top, _, rest = name.partition(".")
        if top == "headrace":
            target = rest.partition(".")[0]
            elsewhere = target and not f"{rest}.".startswith(own)
            if elsewhere and folder in MAY_IMPORT and target not in MAY_IMPORT[folder]:
                wrong.append(name)
        elif folder in PURE and (top not in sys.stdlib_module_names or top in IMPURE):
            wrong.append(name)
    return wrong


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_arrows_only_point_down():
    rooms = {room_of(path) for path in SOURCES}
    assert rooms <= MAY_IMPORT.keys() | ROOF, "a new room needs its line in MAY_IMPORT"
    assert not [(names(path), wrong) for path in SOURCES if (wrong := illegal_imports(parsed(path), path))]


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("core", "import torch"),
        ("core", "import time"),
        ("core", "from os import path"),
        ("core", "def f():\n    import random"),
        ("core", "if TYPE_CHECKING:\n    from headrace.compute.model.kv import Pages"),
        ("core", "from headrace import compute"),
        ("core", "from ...compute import kv"),
        ("core", "import importlib\nimportlib.import_module('torch')"),
        ("core", "import asyncio.events"),
        ("response_cache/rules", "import time"),
        ("response_cache/rules", "from headrace.response_cache.exact import ExactLevel"),
        ("compute", "from headrace.service.thread import EngineThread"),
        ("service", "import headrace.compute.runner as r"),
        ("service", "from headrace.response_cache import lookup"),
        ("observe", "from headrace.compute import kv"),
        ("observe", "from headrace.tuning import live"),
        ("lab", "from headrace.service import service"),
        ("lab", "from headrace.config import Options"),
        ("api", "from headrace.wiring import engine"),
    ],
)
def test_the_law_of_imports_can_be_broken(folder, source):
    assert illegal_imports(ast.parse(source), PACKAGE / folder / "sub" / "file.py")


def test_core_works_where_torch_is_not_installed():
    script = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "transformers", "tokenizers", "starlette", "pydantic"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoTorch())
import importlib, pkgutil
import headrace.core
for module in pkgutil.walk_packages(headrace.core.__path__, "headrace.core."):
    importlib.import_module(module.name)
from tests.property.random_runs import run
run(1)
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def reads_environment(node: ast.AST) -> bool:
    name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
    return name in ("environ", "getenv", "environb")


def sees_options(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("config"):
        return any(name.name == "Options" for name in node.names)
    if isinstance(node, ast.Attribute) and node.attr == "Options":
        return ast.unparse(node).endswith("config.Options")
    return False


def is_given_options(node: ast.AST) -> bool:
    """Whether it is a class with a field or an argument that is the whole configuration."""
    if not isinstance(node, ast.ClassDef) or node.name in {"LLM", "Loaded"}:
        return False
    for part in ast.walk(node):
        if isinstance(part, ast.arg | ast.AnnAssign) and part.annotation is not None:
            seen = {n.id for n in ast.walk(part.annotation) if isinstance(n, ast.Name)}
            if "Options" in seen:
                return True
    return False


def found(broken: Callable[[ast.AST], bool], paths: Iterable[Path]) -> list[str]:
    """File and line of each node that breaks a law."""
    return [f"{names(path)}:{node.lineno}" for path in paths for node in nodes(path) if broken(node)]


def test_only_config_reads_the_environment():
    assert not found(reads_environment, set(SOURCES) - {PACKAGE / "config" / "sources.py"})


def test_only_the_roof_sees_the_whole_configuration():
    assert not found(sees_options, [path for path in SOURCES if room_of(path) not in ROOF | {"config"}])


def test_no_class_is_given_the_whole_configuration():
    assert not found(is_given_options, [path for path in SOURCES if room_of(path) in ROOF])


@pytest.mark.parametrize(
    ("broken", "source"),
    [
        (reads_environment, "import os\nprint(os.environ)"),
        (reads_environment, "from os import getenv"),
        (sees_options, "from headrace.config import Options"),
        (sees_options, "from .. import config\ndef f(o: config.Options): ..."),
        (is_given_options, "class A:\n    def __init__(self, options: Options | None): ..."),
        (is_given_options, "class A:\n    options: Options"),
    ],
)
def test_the_laws_of_configuration_can_be_broken(broken, source):
    assert any(map(broken, ast.walk(ast.parse(source))))


def test_names_say_what_a_module_is():
    empty = {
        "util",
        "utils",
        "helper",
        "helpers",
        "common",
        "misc",
        "manager",
        "managers",
        "handler",
        "handlers",
    }
    words = {
        path: {word for part in path.relative_to(PACKAGE).with_suffix("").parts for word in part.split("_")}
        for path in SOURCES
    }
    assert not [names(path) for path, said in words.items() if said & empty]


def test_every_module_says_what_it_is():
    assert not [names(path) for path in SOURCES if parsed(path).body and not ast.get_docstring(parsed(path))]


def test_no_file_names_a_path_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    places = [("/" + place + "/").encode() for place in ("work", "root")]
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file():
            content = path.read_bytes()
            assert not any(place in content for place in places), name


def test_all_databases_are_opened_by_one_function_that_makes_them_private():
    opening = [path.name for path in SOURCES for _ in range(path.read_text().count("sqlite3.connect("))]
    assert opening == ["files.py"]

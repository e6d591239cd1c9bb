"""The five laws, read from the sources themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "headrace"
SOURCES = sorted(PACKAGE.rglob("*.py"))

GROUND = {"files", "plots"}
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
}
"""Rooms, and what each may import of the package beside itself; the roof may import everything."""

PURE = {"core", "response_cache/rules"}
"""Folders that use of the standard library only what is pure, and nothing from other packages."""

ROOF = {"wiring", "llm", "cli", "testing", "notebook", "__init__", "__main__"}
IMPURE = {"time", "random", "os", "io", "asyncio", "threading", "socket", "logging"}


def room_of(path: Path) -> str:
    """The room of a file; a room's ``__main__`` is a program, which stands on the roof."""
    if path.name == "__main__.py":
        return "__main__"
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Every module that is imported anywhere in the file, also in functions and under TYPE_CHECKING."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "__import__",
            "importlib.import_module",
        ):
            yield ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else "computed"


def illegal_imports(source: str, path: Path) -> list[str]:
    folder = next((pure for pure in PURE if path.is_relative_to(PACKAGE / pure)), room_of(path))
    own = folder.replace("/", ".") + "."
    wrong = []
    for name in imports(ast.parse(source), path):
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


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_arrows_only_point_down(path):
    assert room_of(path) in MAY_IMPORT.keys() | ROOF, "a new room needs its line in MAY_IMPORT"
    assert not illegal_imports(path.read_text(), path)


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
    assert illegal_imports(source, PACKAGE / folder / "sub" / "file.py")


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


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_only_config_reads_the_environment(path):
    if path == PACKAGE / "config" / "sources.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
        assert name not in ("environ", "getenv", "environb"), f"line {node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_only_the_roof_sees_the_whole_configuration(path):
    if room_of(path) in ROOF | {"config"}:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("config"):
            assert all(name.name != "Options" for name in node.names)
        assert not (isinstance(node, ast.Attribute) and ast.unparse(node).endswith("config.Options"))


@pytest.mark.parametrize("path", [p for p in SOURCES if room_of(p) in ROOF], ids=names)
def test_no_class_is_given_the_whole_configuration(path):
    allowed = {"LLM", "Loaded"}
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ClassDef) or node.name in allowed:
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.arg | ast.AnnAssign) and part.annotation is not None:
                seen = {n.id for n in ast.walk(part.annotation) if isinstance(n, ast.Name)}
                assert "Options" not in seen, f"class {node.name}"


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


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_every_module_says_what_it_is(path):
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "no docstring at the head"


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

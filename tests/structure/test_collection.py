"""Collecting the fast tests imports nothing that takes seconds, in each worker."""

from __future__ import annotations

import re

from tests.conftest import TESTS, is_slow

IMPORT = re.compile(r"^from ([\w.]+) import (\([^)]*\)|.*)|^import ([\w.]+)", re.MULTILINE)


def imported(text: str) -> set[str]:
    """What a file may import when it is loaded: modules, and names in them that may be modules."""
    names: set[str] = set()
    for module, listed, alone in IMPORT.findall(text):
        names |= {module or alone, *(f"{module}.{name}" for name in re.findall(r"\w+", listed))}
    return names


def test_no_fast_test_imports_transformers() -> None:
    files = {
        ".".join(path.relative_to(TESTS.parent).with_suffix("").parts): path for path in TESTS.rglob("*.py")
    }
    graph = {name: imported(path.read_text()) for name, path in files.items()}
    heavy = {
        name for name, found in graph.items() if any(each.split(".")[0] == "transformers" for each in found)
    }
    while more := {name for name, found in graph.items() if name not in heavy and found & heavy}:
        heavy |= more
    assert "tests.oracle.tiny" in heavy
    assert not [
        name for name in heavy if name.split(".")[-1].startswith("test_") and not is_slow(files[name])
    ]

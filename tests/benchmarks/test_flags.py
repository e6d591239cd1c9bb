"""Benchmarks start servers and each other with flags that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from headrace.cli import app

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = [path for path in sorted(BENCHMARKS.rglob("*.py")) if path.parent.name != "peers"]
"""Those of `peers` start other engines, whose flags are not known here."""

REDIS = {"--bind", "--dir", "--save"}


def options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from options(inner)


def flags(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"--\w", node.value):
            yield node.value.partition("=")[0]


def own(tree: ast.AST) -> Iterator[str]:
    """Flags that a file itself takes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            yield from flags(node)


def test_every_flag_exists() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    known = (
        REDIS
        | set(options(typer.main.get_command(app)))
        | {flag for tree in trees.values() for flag in own(tree)}
    )
    unknown = {(path.name, flag) for path, tree in trees.items() for flag in flags(tree) if flag not in known}
    assert not unknown

"""Output of commands: tables on the terminal, and one-line errors for files that cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from headrace.cli.progress import progress
from headrace.config import ConfigError

WIDEST = 400
"""Columns of a table that goes into a file or a pipe, where no line is too long."""


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Around what writes to ``path``, which ``flag`` names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} cannot be written: {(error.strerror or str(error)).lower()}"
        ) from None


def show(*what: Any) -> None:
    """Tables and lines on standard output; tables keep their columns where it is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, soft_wrap=True, width=WIDEST)
    for each in what:
        console.print(each, markup=False)


def written(path: Path) -> None:
    """Says on standard output that a file was written."""
    typer.echo(f"written: {path}")


def check_export(path: Path | None) -> None:
    """Says before the work begins that ``--export`` cannot be written.

    Raises:
        ConfigError: the file's name ends in something else than .csv or .parquet, or pyarrow is missing.
    """
    from headrace.lab.export import BadExport, check

    if path is None:
        return
    try:
        check(path)
    except BadExport as error:
        raise ConfigError(f"--export {path}: {error}") from None


def export(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Writes one row per request, if ``--export`` was given."""
    from headrace.lab.export import write

    if path is None:
        return
    with writing("--export", path), progress(f"writing {path}"):
        write(path, rows)
    written(path)

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
"""Width of tables in columns if output is a file or a pipe."""


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Context manager that reports an error of writing to ``path`` under the name of ``flag``.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} cannot be written: {(error.strerror or str(error)).lower()}"
        ) from None


def show(*what: Any) -> None:
    """Prints tables and lines; tables are not narrowed if standard output is not a terminal."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, soft_wrap=True, width=WIDEST)
    for each in what:
        console.print(each, markup=False)


def written(path: Path) -> None:
    """Prints that a file was written."""
    typer.echo(f"written: {path}")


def check_export(path: Path | None) -> None:
    """Checks ``--export`` before the work begins.

    Raises:
        ConfigError: the file name does not end in .csv or .parquet, or pyarrow is missing.
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

"""Requests as rows of a CSV or Parquet file, for notebooks and spreadsheets. Times are in seconds."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from headrace.files import replacing

COLUMNS = (
    *(
        "run",
        "round",
        "request",
        "tenant",
        "service_class",
        "arrived_seconds",
        "ttft_seconds",
        "tpot_seconds",
    ),
    *("e2e_seconds", "prompt_tokens", "cached_tokens", "output_tokens", "finish_reason", "error"),
)
"""The columns; a time that a request does not have (a TTFT of a failed one) is empty."""

Row = Mapping[str, Any]


class BadExport(ValueError):
    """A file that rows cannot be written to; the message says what to do."""


def check(path: Path) -> None:
    """Whether rows can be written to a file of this name.

    Raises:
        BadExport: an unknown ending, or Parquet without pyarrow.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise BadExport("expected a file name that ends in .csv or .parquet")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise BadExport("Parquet needs pyarrow: pip install pyarrow, or write a .csv file")


def write(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows with the columns of `COLUMNS`; a field that a row lacks is empty.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as file:
        if path.suffix == ".parquet":
            _write_parquet(file, rows)
        else:
            write_csv(file, COLUMNS, rows)


def write_csv(file: IO[bytes], columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Writes rows as CSV in UTF-8; a column that a row lacks is empty."""
    text = TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    text.detach()


def _write_parquet(file: IO[bytes], rows: Sequence[Row]) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {name: [row.get(name) for row in rows] for name in COLUMNS}
    parquet.write_table(pyarrow.table(columns), file)

"""Rows per request as CSV and Parquet."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from headrace.lab.bench.report import COLUMNS, BadExport, check_rows, write_rows

ROWS = [
    {"run": "a", "request": "r0", "ttft_seconds": 0.25},
    {"run": "a", "request": "r1", "error": "lost, again"},
]


def test_a_csv_has_all_columns_and_empty_cells_for_what_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    write_rows(path, ROWS)
    first, second = csv.DictReader(path.open())
    assert tuple(first) == COLUMNS
    assert (first["ttft_seconds"], first["error"]) == ("0.25", "")
    assert (second["ttft_seconds"], second["error"]) == ("", "lost, again")


def test_a_parquet_file_has_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    check_rows(path)
    write_rows(path, ROWS)
    table = parquet.read_table(path)
    assert tuple(table.column_names) == COLUMNS
    assert table.column("ttft_seconds").to_pylist() == [0.25, None]


def test_what_cannot_be_written_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadExport, match=r"\.csv or \.parquet"):
        check_rows(Path("rows.xlsx"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("headrace.lab.bench.report.find_spec", lambda name: None)
    with pytest.raises(BadExport, match="pip install pyarrow"):
        check_rows(Path("rows.parquet"))

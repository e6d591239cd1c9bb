from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

from headrace.response_cache.semantic.row_store import RowStore
from tests.response_cache.semantic.scenes import row

NOW = 1000.0


def rows(path: Path, encoder: str = "words@1") -> list[str]:
    row_store = RowStore(path, encoder)
    found = [each.question for each in row_store.load(NOW)]
    row_store.close()
    return found


def test_rows_come_back_as_they_were(tmp_path):
    kept = [
        row("red shoes", tags=("*", "tag:x")),
        row("blue hats", partition=b"other", answer=7, expires=NOW + 5),
    ]
    row_store = RowStore(tmp_path / "new" / "rows", "words@1")
    row_store.write(kept, [])
    row_store.close()
    again = RowStore(tmp_path / "new" / "rows", "words@1")
    assert sorted(again.load(NOW), key=lambda each: each.question) == [kept[1], kept[0]]
    again.close()


def test_writing_replaces_and_deletes(tmp_path):
    row_store = RowStore(tmp_path / "rows", "words@1")
    row_store.write([row("red shoes"), row("blue hats"), row("old socks", expires=NOW)], [])
    row_store.write([replace(row("red shoes"), answer=9)], [b"blue hats", b"never there"])
    assert [(each.question, each.answer) for each in row_store.load(NOW)] == [("red shoes", 9)]
    row_store.close()


def test_rows_of_another_encoder_are_of_no_use(tmp_path):
    row_store = RowStore(tmp_path / "rows", "words@1")
    row_store.write([row("red shoes")], [])
    row_store.close()
    assert rows(tmp_path / "rows", "words@1") == ["red shoes"]
    assert rows(tmp_path / "rows", "words@2") == []
    assert rows(tmp_path / "rows", "words@1") == []


def test_two_processes_may_have_it_open(tmp_path):
    first, second = RowStore(tmp_path / "rows", "words@1"), RowStore(tmp_path / "rows", "words@1")
    first.write([row("red shoes")], [])
    second.write([row("blue hats")], [])
    assert {each.question for each in first.load(NOW)} == {"red shoes", "blue hats"}
    first.close()
    second.close()
    with sqlite3.connect(tmp_path / "rows") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)

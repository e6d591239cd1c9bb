"""All stores in SQLite treat their file in one way, and read the files of the version before."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace.api.batch import store as batches
from headrace.api.responses import store as responses
from headrace.files import Layout, open_database
from headrace.observe.cost import usage
from headrace.response_cache import history
from headrace.response_cache.semantic import rows
from headrace.response_cache.stores import sqlite as cache


def closed(work: Any) -> None:
    asyncio.run(work)


class Kind(NamedTuple):
    layout: Layout
    open: Callable[[Path], Any]
    close: Callable[[Any], object]


KINDS = {
    "cache": Kind(
        cache.LAYOUT, lambda path: cache.SQLiteStore(path, 1 << 20), lambda store: closed(store.close())
    ),
    "rows": Kind(rows.LAYOUT, lambda path: rows.RowStore(path, "words@1"), lambda store: store.close()),
    "history": Kind(history.LAYOUT, history.History, lambda store: closed(store.stop())),
    "responses": Kind(
        responses.LAYOUT, lambda path: responses.ResponseStore(path, 1 << 20), lambda store: store.close()
    ),
    "batches": Kind(
        batches.LAYOUT,
        lambda path: batches.BatchStore(path, batches.Limits(9, 1 << 20, 9)),
        lambda store: store.close(),
    ),
    "usage": Kind(usage.LAYOUT, lambda path: usage.UsageStore(path, "EUR"), lambda store: store.close()),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def reopened(kind: Kind, path: Path) -> None:
    kind.close(kind.open(path))


def layout_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("PRAGMA user_version").fetchone()[0])


def write(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.executescript(script)


def test_a_new_file_is_private_and_has_the_newest_layout(kind: Kind, path: Path) -> None:
    reopened(kind, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert layout_of(path) == kind.layout.newest
    reopened(kind, path)


@pytest.mark.parametrize(
    "content", [bytes(8192), b"SQLite format 3\0" + b"\xff" * 5000], ids=["zeros", "torn"]
)
def test_a_damaged_file_is_renamed_and_reported(
    kind: Kind, path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        reopened(kind, path)
    aside = path.with_name("store.db.damaged")
    assert aside.read_bytes() == content
    assert stat.S_IMODE(aside.stat().st_mode) == 0o600
    assert f"{path} is damaged" in caplog.text
    assert kind.layout.kind in caplog.text
    assert layout_of(path) == kind.layout.newest


def test_a_file_that_is_no_database_is_refused_and_stays_as_it_is(kind: Kind, path: Path) -> None:
    """A mistyped path, or a link, may name any file of the user."""
    other = path.with_name("notes.txt")
    other.write_text("my notes\n" * 100)
    other.chmod(0o644)
    path.symlink_to(other)
    with pytest.raises(OSError, match=f"is no database, so it is not {kind.layout.kind}"):
        kind.open(path)
    assert other.read_text() == "my notes\n" * 100
    assert stat.S_IMODE(other.stat().st_mode) == 0o644
    assert sorted(path.parent.iterdir()) == [other, path]


def test_a_file_of_a_newer_layout_is_refused_and_stays_as_it_is(kind: Kind, path: Path) -> None:
    reopened(kind, path)
    write(path, "PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(OSError, match=f"newer version of Headrace: it has layout 99 of {kind.layout.kind}"):
        kind.open(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [0, 1, 2])
def test_the_database_of_another_program_is_refused_and_stays_as_it_is(
    kind: Kind, path: Path, version: int
) -> None:
    write(path, f"CREATE TABLE precious (x); PRAGMA user_version = {version}")
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(OSError, match=f"another program, not {kind.layout.kind}"):
        kind.open(path)
    assert path.read_bytes() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_file_that_cannot_be_created_is_refused(kind: Kind, path: Path) -> None:
    path.mkdir()
    with pytest.raises(OSError, match=r"store\.db"):
        kind.open(path)


def test_a_database_in_use_is_refused_and_stays(path: Path) -> None:
    layout = KINDS["history"].layout
    holder = open_database(path, layout, exclusive=True)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(OSError, match="cannot be used as a request history: database is locked"):
        open_database(path, layout, busy_seconds=0.0)
    holder.close()
    assert not path.with_name("store.db.damaged").exists()


def test_damage_in_the_middle_is_found_by_a_thorough_search(path: Path) -> None:
    layout = Layout("a store of tests", "t", ("CREATE TABLE t (a);",))
    with closing(open_database(path, layout)) as database:
        database.executemany("INSERT INTO t VALUES (?)", [(bytes(3000),)] * 20)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    open_database(path, layout).close()
    assert not path.with_name("store.db.damaged").exists()
    with closing(open_database(path, layout, thoroughly=True)) as database:
        assert database.execute("SELECT count(*) FROM t").fetchone() == (0,)
    assert path.with_name("store.db.damaged").exists()


def test_layouts_are_converted_one_after_another_and_all_or_none(path: Path) -> None:
    one = "CREATE TABLE t (a); INSERT INTO t VALUES (1); CREATE TABLE u (a);"
    two = "CREATE TRIGGER g AFTER INSERT ON t BEGIN DELETE FROM u; DELETE FROM u; END; INSERT INTO u VALUES (2);"
    open_database(path, Layout("a store of tests", "t", (one,))).close()
    with pytest.raises(OSError, match="a store of tests: no such table: missing"):
        open_database(path, Layout("a store of tests", "t", (one, two, "DELETE FROM missing;")))
    assert layout_of(path) == 1
    with closing(open_database(path, Layout("a store of tests", "t", (one, two)))) as database:
        assert database.execute("SELECT * FROM u").fetchall() == [(2,)]
        database.execute("INSERT INTO t VALUES (3)")
        assert database.execute("SELECT * FROM u").fetchall() == []
    assert layout_of(path) == 2


def test_a_layout_before_the_first_is_set_aside(path: Path) -> None:
    write(path, "CREATE TABLE entries (key BLOB); PRAGMA user_version = 1")
    reopened(KINDS["cache"], path)
    assert layout_of(path) == 2
    assert layout_of(path.with_name("store.db.damaged")) == 1


async def cached(path: Path) -> object:
    store = cache.SQLiteStore(path, 1 << 20, clock=lambda: 1001.0)
    found = await store.get(b"k" * 32), dict(await store.versions())
    await store.clear("tag:x")
    gone = await store.get(b"k" * 32)
    await store.close()
    return (*found, gone)


async def recorded(path: Path) -> object:
    log = history.History(path)
    (one,) = await log.candidates(3000.0)
    found = one.demand.times, one.seconds, await log.recorded(one.key), await log.prefixes()
    await log.stop()
    return found


def indexed(path: Path) -> object:
    with closing(rows.RowStore(path, "words@1")) as store:
        return [(row.question, row.tags) for row in store.load(1000.0)]


async def stored(path: Path) -> object:
    store = responses.ResponseStore(path, 1 << 20, lambda: 1000.0)
    record = await store.get("ann", "a")
    assert record is not None
    found = record.input, record.response["id"], await store.events("a"), await store.item("ann", "out_a")
    store.close()
    return found


def batched(path: Path) -> object:
    with closing(batches.BatchStore(path, batches.Limits(9, 1 << 20, 9))) as store:
        return store.file("t", "file-1").filename, store.batch("t", "batch_1").input_file_id


def used(path: Path) -> object:
    with closing(usage.UsageStore(path, "EUR")) as store:
        (cost,) = store.tenant("a")["costs"]
        return cost["model"], cost["requests"], cost["cost"]


WORDS = history.Recorded("/v1/completions", "key-1", None, b'{"prompt":"hi"}')
CONTENTS: dict[str, tuple[Callable[[Path], object], object]] = {
    "cache": (lambda path: asyncio.run(cached(path)), (b"value", {"tag:y": 1}, None)),
    "history": (
        lambda path: asyncio.run(recorded(path)),
        (1, 1.5, WORDS, [history.Recorded("/v1/completions", None, None, b"{}")]),
    ),
    "rows": (indexed, [("red shoes", ())]),
    "responses": (
        lambda path: asyncio.run(stored(path)),
        ([{"id": "msg_a"}], "a", b"123", {"type": "message", "id": "out_a"}),
    ),
    "batches": (batched, ("file-1.jsonl", "file-1")),
    "usage": (used, ("fox", 1, 1.0)),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_of_the_version_before_keeps_its_content(name: str, path: Path) -> None:
    """``databases`` has the files that the version before this opener wrote, as SQL."""
    script = (Path(__file__).parent / "databases" / f"{name}.sql").read_text(encoding="utf-8")
    read, expected = CONTENTS[name]
    for journal in ("DELETE", "WAL"):
        path.unlink(missing_ok=True)
        write(path, f"PRAGMA journal_mode = {journal}; {script}")
        assert read(path) == expected
        assert layout_of(path) == KINDS[name].layout.newest
    assert not path.with_name("store.db.damaged").exists()

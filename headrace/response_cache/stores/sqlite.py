"""The SQLite store: cached responses in a file that survives restarts and that processes of one machine can share.

It uses write-ahead logging. One thread writes in batches, so that no lookup waits for the disk; `READERS` threads read.
If the file is found damaged while it is in use, it is replaced as at the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from headrace.core.ports import StoreFacts, ValueTooLarge
from headrace.files import Layout, connect, is_damaged, open_database, private_folder
from headrace.response_cache.stores.memory import LARGEST_SHARE

BATCH = 256
"""Maximum number of writes in one transaction."""

READERS = 2
BUSY_SECONDS = 1.0
"""How long a write waits for the transaction of another process."""

USED_SECONDS = 60.0
"""Resolution of the time of last use: with a finer one, each read would cause a write."""

EVICTED_AT_ONCE = 64

_TABLES = """
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, until REAL NOT NULL, used REAL NOT NULL, tags TEXT NOT NULL,
    value BLOB NOT NULL
);
CREATE INDEX by_use ON entries (used);
CREATE TABLE versions (tag TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
"""
LAYOUT = Layout("a response cache", "entries", (_TABLES,), first=2)
_PUT = """
INSERT INTO entries (key, until, used, tags, value) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE
SET until = excluded.until, used = excluded.used, tags = excluded.tags, value = excluded.value
"""
_EVICT = "DELETE FROM entries WHERE id IN (SELECT id FROM entries ORDER BY used LIMIT ?)"
_RAISE = (
    "INSERT INTO versions VALUES (?, ?) ON CONFLICT (tag) DO UPDATE SET number = number + excluded.number"
)

_Change = Callable[[sqlite3.Connection], object]


class _Work(NamedTuple):
    change: _Change
    done: Future[None]


class SQLiteStore:
    """A `core.ports.Store` in the file ``path``, which grows to about ``max_bytes``.

    Raises:
        OSError: the file cannot be created or read.
    """

    name = "sqlite"

    def __init__(self, path: str | Path, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path).expanduser()
        self._max_bytes = max_bytes
        self._clock = clock
        self._facts = StoreFacts(None, None, 0)
        self._used: dict[int, float] = {}
        self._counted = -USED_SECONDS
        private_folder(self._path.parent)
        open_database(self._path, LAYOUT, busy_seconds=BUSY_SECONDS).close()
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._generation = 0  # changes when the file is replaced
        self._local = threading.local()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="headrace-sqlite")
        self._writer = threading.Thread(target=self._write, name="headrace-sqlite-writer", daemon=True)
        self._writer.start()

    async def get(self, key: bytes) -> bytes | None:
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._get, key)

    async def put(self, key: bytes, value: bytes, ttl: float, tags: tuple[str, ...]) -> None:
        if len(value) > (limit := self._max_bytes // LARGEST_SHARE):
            raise ValueTooLarge(len(value), limit)
        now = self._clock()
        row = (key, now + ttl, now, " ".join(map(_mark, tags)), value)
        await self._submit(lambda connection: connection.execute(_PUT, row))

    async def delete(self, key: bytes) -> None:
        await self._submit(lambda db: db.execute("DELETE FROM entries WHERE key = ?", (key,)))

    async def clear(self, tag: str) -> None:
        def change(connection: sqlite3.Connection) -> None:
            connection.execute(_RAISE, (tag, 1))
            connection.execute("DELETE FROM entries WHERE instr(tags, ?)", (_mark(tag),))

        await self._submit(change)

    async def versions(self) -> Mapping[str, int]:
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._versions)

    async def advance(self, steps: Mapping[str, int]) -> None:
        rows = list(steps.items())
        await self._submit(lambda connection: connection.executemany(_RAISE, rows))

    def facts(self) -> StoreFacts:
        return self._facts

    async def close(self) -> None:
        self._work.put(None)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._writer.join)
        await loop.run_in_executor(None, self._readers.shutdown)

    async def _submit(self, change: _Change) -> None:
        done: Future[None] = Future()
        self._work.put(_Work(change, done))
        await asyncio.wrap_future(done)

    def _reader(self) -> sqlite3.Connection:
        """This thread's connection."""
        generation, connection = getattr(self._local, "reader", (None, None))
        if generation != self._generation or connection is None:
            connection = connect(self._path, BUSY_SECONDS)
            self._local.reader = (self._generation, connection)
        return connection

    def _get(self, key: bytes) -> bytes | None:
        found = self._reader().execute("SELECT id, until, used, value FROM entries WHERE key = ?", (key,))
        row = found.fetchone()
        now = self._clock()
        if row is None or row[1] <= now:
            return None
        if abs(now - row[2]) > USED_SECONDS:
            self._used[row[0]] = now
        value: bytes = row[3]
        return value

    def _versions(self) -> Mapping[str, int]:
        return dict(self._reader().execute("SELECT tag, number FROM versions").fetchall())

    def _write(self) -> None:
        """The writer thread: commits everything that waits, in batches."""
        connection: sqlite3.Connection | None = None
        ending = False
        while not ending:
            batch = [self._work.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < BATCH:
                    batch.append(self._work.get_nowait())
            ending = None in batch
            work = [each for each in batch if each is not None and each.done.set_running_or_notify_cancel()]
            try:
                connection = connection or connect(self._path, BUSY_SECONDS)
                self._commit(connection, work)
            except Exception as error:
                connection = self._recover(connection, error)
                for each in work:
                    each.done.set_exception(error)
            else:
                for each in work:
                    each.done.set_result(None)
        if connection is not None:
            connection.close()

    def _commit(self, connection: sqlite3.Connection, work: list[_Work]) -> None:
        now = self._clock()
        used, self._used = self._used, {}
        connection.execute("BEGIN IMMEDIATE")
        for each in work:
            each.change(connection)
        connection.executemany(
            "UPDATE entries SET used = ? WHERE id = ?", [(at, row) for row, at in used.items()]
        )
        evicted = self._make_room(connection, now)
        connection.commit()
        entries = self._facts.entries
        if abs(now - self._counted) >= USED_SECONDS or entries is None:
            self._counted = now
            (entries,) = connection.execute("SELECT count(*) FROM entries").fetchone()
        self._facts = StoreFacts(entries, _nbytes(connection), self._facts.evictions + evicted)

    def _make_room(self, connection: sqlite3.Connection, now: float) -> int:
        """Delete expired entries, then the least recently used, until the file fits; returns the evictions."""
        if _nbytes(connection) <= self._max_bytes:
            return 0
        connection.execute("DELETE FROM entries WHERE until <= ?", (now,))
        evicted = 0
        while _nbytes(connection) > self._max_bytes:
            dropped = connection.execute(_EVICT, (EVICTED_AT_ONCE,)).rowcount
            if not dropped:
                break
            evicted += dropped
        return evicted

    def _recover(self, connection: sqlite3.Connection | None, error: Exception) -> sqlite3.Connection | None:
        """The connection to use after a failed batch; None to open a new one."""
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.rollback()
        if not is_damaged(error):
            return connection
        if connection is not None:
            connection.close()
        with contextlib.suppress(OSError):  # retried with the next batch
            open_database(self._path, LAYOUT, busy_seconds=BUSY_SECONDS, thoroughly=True).close()
            self._generation += 1
        return None


def _nbytes(connection: sqlite3.Connection) -> int:
    """Bytes of the pages in use."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _mark(tag: str) -> str:
    """A tag as stored in a row: all have one length and alphabet, so that none is part of another."""
    return hashlib.sha256(tag.encode("utf-8", "surrogatepass")).hexdigest()[:32]

"""A row of the semantic cache, an indexed request with its answer, and where rows outlive the index: in an SQLite
file, from which it is rebuilt, and in a store of responses, so that a response which one server computes serves on
the others.

The file is for one thread. Rows of another encoder are dropped, because all rows can be computed again. Responses
always come from the exact cache; a row without its entry is removed when it is found.

For shared rows, a task on the event loop writes what the search thread has kept and reads what other servers have
written, in bounded batches. No lookup waits for either. The search thread unpacks and indexes the rows, in the time
that it has for tasks. While the store fails, the rows in memory stay and new ones wait to be written. Each row is
sealed with the secret of the responses. A row that is truncated, forged, moved from another key, or of another
encoder or model is skipped and counted. A row has no name of a tenant: its partition is a digest over it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.core.events import Fault, StoreFaulted
from headrace.files import Layout, open_database, private_folder
from headrace.response_cache.ports import Change, RowFeed, WrittenRow
from headrace.response_cache.rules.circuit_breaker import CircuitBreaker
from headrace.response_cache.rules.entry import Damaged, Seal
from headrace.response_cache.stores.tier import WRITE_SECONDS

_OVERHEAD = 600
"""Approximate bytes of the objects around the texts and vectors of a row."""


@dataclass(frozen=True, slots=True)
class Row:
    """An entry of the exact cache (``key``), the last user message that it answers, and the vectors of both.

    ``partition`` is the digest of everything that must be equal. ``answer`` is the class of its answer: entries with
    equal answers share it. ``answer_text`` is the normalized answer, ``answer_vector`` its vector or empty. ``tags``
    are the entry's; ``expires`` is a Unix time.
    """

    key: bytes
    partition: bytes
    question: str
    vector: bytes
    answer: int
    answer_text: str
    answer_vector: bytes
    tags: tuple[str, ...]
    expires: float

    @property
    def nbytes(self) -> int:
        """Its size in memory, including its vectors in the index."""
        texts = len(self.question) + len(self.answer_text)
        return _OVERHEAD + texts + 2 * len(self.vector) + len(self.answer_vector)


_FORMAT = 1
"""Version of what is stored in a row."""
_BUSY_SECONDS = 1.0
_TABLES = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rows (
    key BLOB PRIMARY KEY, partition BLOB NOT NULL, question TEXT NOT NULL, vector BLOB NOT NULL,
    answer INTEGER NOT NULL, answer_text TEXT NOT NULL, answer_vector BLOB NOT NULL,
    tags TEXT NOT NULL, expires REAL NOT NULL
);
"""
LAYOUT = Layout("an index of the semantic cache", "rows", (_TABLES,), unnumbered=True)
_PUT = "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class RowStore:
    """The file ``path`` with the rows of one ``encoder``.

    Raises:
        OSError: the file cannot be created or written.
    """

    def __init__(self, path: Path, encoder: str) -> None:
        private_folder(path.parent)
        self._connection = open_database(path, LAYOUT, busy_seconds=_BUSY_SECONDS, isolation_level="DEFERRED")
        format_of_rows = json.dumps([_FORMAT, encoder])
        found = self._connection.execute("SELECT value FROM about WHERE name = 'whose'").fetchone()
        with self._connection:
            if found != (format_of_rows,):
                self._connection.execute("DELETE FROM rows")
            self._connection.execute("INSERT OR REPLACE INTO about VALUES ('whose', ?)", (format_of_rows,))

    def load(self, now: float) -> Iterator[Row]:
        """All rows that have not expired, oldest first."""
        with self._connection:
            self._connection.execute("DELETE FROM rows WHERE expires <= ?", (now,))
        for (
            key,
            partition,
            question,
            vector,
            answer,
            answer_text,
            answer_vector,
            tags,
            expires,
        ) in self._connection.execute("SELECT * FROM rows ORDER BY expires"):
            held = tuple(json.loads(tags))
            yield Row(key, partition, question, vector, answer, answer_text, answer_vector, held, expires)

    def write(self, kept: Iterable[Row], forgotten: Iterable[bytes]) -> None:
        """Add rows and delete others, in one transaction."""
        with self._connection:
            self._connection.executemany(
                _PUT,
                [
                    (
                        *(row.key, row.partition, row.question, row.vector, row.answer),
                        *(row.answer_text, row.answer_vector, json.dumps(row.tags), row.expires),
                    )
                    for row in kept
                ],
            )
            self._connection.executemany("DELETE FROM rows WHERE key = ?", [(key,) for key in forgotten])

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
"""Interval of reading what other servers have written."""

AT_ONCE = 64
"""Maximum rows of one batch: the event loop is blocked for a millisecond or two."""

WAITING = 1000
"""Maximum rows that wait to be written while the store fails; the oldest are dropped."""

SPACE_BYTES = 16
MAGIC = b"HRR\x01"
"""The last byte is the version of the layout."""

_FIXED = struct.Struct("<dQ5I")  # expires, class of the answer, five lengths
_DOMAIN = b"row"
"""Begins the keys under which rows are sealed: the seal of a response under the same key is no seal of a row."""

_FLOAT_BYTES = 4


def space_of(encoder: str, dimensions: int, fingerprint: bytes) -> bytes:
    """What rows have in common so that they can be used: the encoder of their vectors, and the engine."""
    named = json.dumps([encoder, dimensions, fingerprint.hex()])
    return hashlib.sha256(named.encode()).digest()[:SPACE_BYTES]


class RowForm(NamedTuple):
    """The bytes of the rows of one space, whose vectors have ``dimensions``."""

    space: bytes
    dimensions: int
    seal: Seal

    def pack(self, row: Row) -> bytes:
        """The bytes to write for a row."""
        parts = (
            row.partition,
            row.question.encode("utf-8", "surrogatepass"),
            row.answer_text.encode("utf-8", "surrogatepass"),
            row.answer_vector,
            json.dumps(row.tags).encode(),
        )
        fixed = _FIXED.pack(row.expires, row.answer, *map(len, parts))
        body = b"".join((MAGIC, self.space, fixed, *parts, row.vector))
        return self.seal.close(_DOMAIN + row.key, body)

    def unpack(self, key: bytes, sealed: bytes) -> Row:
        """The row that `pack` made bytes of, for the same key.

        Raises:
            Damaged: they are not such bytes.
        """
        body = self.seal.open(_DOMAIN + key, sealed)
        head = len(MAGIC) + SPACE_BYTES
        if len(body) < head + _FIXED.size or not body.startswith(MAGIC):
            raise Damaged("not a row of this version")
        if body[len(MAGIC) : head] != self.space:
            raise Damaged("a row of another encoder or model")
        try:
            expires, answer, *lengths = _FIXED.unpack_from(body, head)
            parts = list(_cut(body, head + _FIXED.size, lengths))
            partition, question, said, answer_vector, tags, vector = parts
            row = Row(
                key=key,
                partition=partition,
                question=question.decode("utf-8", "surrogatepass"),
                vector=vector,
                answer=answer,
                answer_text=said.decode("utf-8", "surrogatepass"),
                answer_vector=answer_vector,
                tags=tuple(map(str, json.loads(tags))),
                expires=expires,
            )
        except (struct.error, ValueError, TypeError) as error:
            raise Damaged(f"a row cannot be read: {error}") from None
        if not (self._is_vector(vector) and (not answer_vector or self._is_vector(answer_vector))):
            raise Damaged(f"a row has no vector of {self.dimensions} numbers")
        if not math.isfinite(expires):
            raise Damaged("a row has no time of expiry")
        return row

    def _is_vector(self, packed: bytes) -> bool:
        whole = len(packed) == _FLOAT_BYTES * self.dimensions
        return whole and bool(np.isfinite(np.frombuffer(packed, np.float32)).all())


def _cut(body: bytes, at: int, lengths: Sequence[int]) -> Iterator[bytes]:
    """Parts of these lengths, and the rest."""
    for length in lengths:
        yield body[at : at + length]
        at += length
    yield body[at:]


Take = Callable[[Sequence[Change], RowForm], "Future[int]"]
"""Indexes the rows of changes; the result is the number of damaged ones."""


class SharedRows:
    """The task between the search thread and the rows in the store called ``store``.

    `put` and `delete` may be called by any thread, everything else by the event loop. ``tell`` receives the faults of
    the store and of rows, ``take`` the changes of other servers. ``wall`` is Unix time.
    """

    def __init__(
        self,
        store: str,
        feed: RowFeed,
        form: RowForm,
        tell: Callable[[StoreFaulted], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self._feed = feed
        self._form = form
        self._tell = tell
        self._wall = wall
        self._breaker = CircuitBreaker()
        self._waiting: dict[bytes, Row | None] = {}  # None: to be deleted
        self._rows_waiting = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self._counts = {"read": 0, "written": 0, "deleted": 0, "damaged": 0, "dropped": 0}

    def start(self, take: Take) -> None:
        """Begin to read and write, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(take))

    async def stop(self) -> None:
        """Write what waits, if the store answers, and stop."""
        self._ending = True
        while self._task is not None and not self._task.done():
            self._task.cancel()  # again if the client library has lost the first: the search thread takes no more rows
            await asyncio.wait([self._task], timeout=POLL_SECONDS)
        if self._waiting and self._feed.ready and not self._breaker.is_failing:
            await self._attempt(self._write)

    def put(self, row: Row) -> None:
        """Write a row that this server has kept."""
        self._call(row.key, row)

    def delete(self, key: bytes) -> None:
        """Delete the row of a wrong response, for all servers."""
        self._call(key, None)

    def state(self) -> Mapping[str, Any]:
        """Its counts, as plain values for JSON."""
        reachable = self._feed.ready and not self._breaker.is_failing
        return {
            "store": self.store,
            "reachable": reachable,
            "waiting": len(self._waiting),
            **self._counts,
        }

    def _call(self, key: bytes, row: Row | None) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._add, key, row)

    def _add(self, key: bytes, row: Row | None) -> None:
        self._remove(key)
        self._waiting[key] = row
        self._rows_waiting += row is not None
        if self._rows_waiting > WAITING:
            oldest = next(key for key, each in self._waiting.items() if each is not None)
            self._remove(oldest)
            self._counts["dropped"] += 1
        self._wake.set()

    def _remove(self, key: bytes) -> None:
        if key in self._waiting:
            self._rows_waiting -= self._waiting.pop(key) is not None

    async def _run(self, take: Take) -> None:
        while not self._ending:
            while self._waiting and not self._ending and await self._attempt(self._write):
                pass
            while not self._ending and await self._attempt(lambda: self._read(take)):
                pass
            self._wake.clear()
            pause = POLL_SECONDS
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                continue
            if self._breaker.is_failing:  # what woke this task cannot be written yet
                await asyncio.sleep(pause)

    async def _attempt(self, work: Callable[[], Any]) -> bool:
        """Do ``work``; returns whether there may be more to do at once."""
        if not self._feed.ready or not self._breaker.permits(time.monotonic()):
            return False
        try:
            more = bool(await work())
        except TimeoutError:
            self._failed(Fault.SLOW, f"no answer within {WRITE_SECONDS:g} s")
        except Exception as error:  # client libraries raise errors of many types
            self._failed(Fault.FAILED, f"{type(error).__name__}: {error}")
        else:
            if self._breaker.is_failing:
                logger.info("rows of the semantic cache are shared through %s again", self.store)
            self._breaker.succeeded()
            return more
        return False

    async def _write(self) -> bool:
        now = self._wall()
        batch = dict(list(self._waiting.items())[:AT_ONCE])
        rows = [
            WrittenRow(key, self._form.pack(row), row.expires - now, row.tags)
            for key, row in batch.items()
            if row is not None and row.expires > now
        ]
        deleted = [key for key, row in batch.items() if row is None]
        async with asyncio.timeout(WRITE_SECONDS):
            await self._feed.write(rows, deleted)
        for key, row in batch.items():
            if self._waiting.get(key) is row:  # otherwise it has changed meanwhile
                self._remove(key)
        self._counts["written"] += len(rows)
        self._counts["deleted"] += len(deleted)
        return bool(self._waiting)

    async def _read(self, take: Take) -> bool:
        async with asyncio.timeout(WRITE_SECONDS):
            changes = await self._feed.read(AT_ONCE)
        if not changes:
            return False
        damaged = await asyncio.wrap_future(take(changes, self._form))
        self._counts["read"] += sum(change.row is not None for change in changes) - damaged
        self._counts["damaged"] += damaged
        if damaged:
            self._tell_fault(Fault.DAMAGED, f"{damaged} rows of the semantic cache are damaged or forged")
        return True

    def _failed(self, fault: Fault, message: str) -> None:
        if not self._breaker.is_failing:
            logger.warning("rows of the semantic cache are not shared through %s: %s", self.store, message)
        self._breaker.failed(time.monotonic())
        self._tell_fault(fault, message)

    def _tell_fault(self, fault: Fault, message: str) -> None:
        if fault is Fault.DAMAGED:
            logger.warning("%s: %s", self.store, message)
        self._tell(StoreFaulted(f"{self.store}_rows", fault, message))


def unpacked(changes: Iterable[Change], form: RowForm, now: float) -> tuple[list[Row], list[bytes], int]:
    """The rows to keep, the keys to forget, and the number of damaged rows."""
    rows: list[Row] = []
    forgotten: list[bytes] = []
    damaged = 0
    for key, value in changes:
        if value is None:
            forgotten.append(key)
            continue
        try:
            row = form.unpack(key, value)
        except Damaged:
            damaged += 1
            continue
        if row.expires > now:
            rows.append(row)
    return rows, forgotten, damaged

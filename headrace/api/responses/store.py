"""Stored responses in SQLite, in a file that survives a restart or in memory; their streams, which can be read again.

Bytes, number and age are limited. If the store is full, the least recently used response of the tenant that has most
(bytes or responses, by the limit that is reached) is evicted. One thread uses the database, so that calls apply in
order and none blocks the event loop. The stream of a response can also be read while it grows (`EventLog`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.exchange import DISCONNECTED, record_error
from headrace.api.replies import DONE, PING, PING_SECONDS, SSE_HEADERS, hung_up, pieces
from headrace.api.responses.items import Stored
from headrace.api.responses.output import ResponseObject
from headrace.files import Layout, open_database

logger = logging.getLogger(__name__)

MAX_RESPONSES = 100_000
MAX_AGE_SECONDS = 30 * 86_400.0
"""Retention of a response: 30 days, as at OpenAI."""

MAX_CHAIN = 1_000
"""Maximum responses in a chain of ``previous_response_id``."""

_LAYOUT_1 = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, created REAL NOT NULL, used REAL NOT NULL,
    bytes INTEGER NOT NULL, status TEXT NOT NULL, input BLOB NOT NULL, response BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX by_use ON responses (tenant, used);
CREATE INDEX by_age ON responses (created);
"""
_LAYOUT_2 = """
CREATE TABLE streams (id TEXT PRIMARY KEY, events BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE items (id TEXT NOT NULL, response TEXT NOT NULL, PRIMARY KEY (id, response)) WITHOUT ROWID;
CREATE INDEX by_response ON items (response);
CREATE TRIGGER beside AFTER DELETE ON responses BEGIN
    DELETE FROM streams WHERE id = old.id;
    DELETE FROM items WHERE response = old.id;
END;
INSERT INTO items
SELECT json_extract(item.value, '$.id') AS name, r.id FROM responses AS r, json_each(CAST(r.input AS TEXT)) AS item
WHERE name IS NOT NULL
UNION
SELECT json_extract(item.value, '$.id') AS name, r.id
FROM responses AS r, json_each(CAST(r.response AS TEXT), '$.output') AS item WHERE name IS NOT NULL;
"""
"""Tables that layout 1 did not have: the events of streams, and which response has an item."""
LAYOUT = Layout("a store of responses", "responses", (_LAYOUT_1, _LAYOUT_2))
_PUT = """
INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE
SET used = excluded.used, bytes = excluded.bytes, status = excluded.status, response = excluded.response
"""
_CHAIN = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 1 FROM responses WHERE id = ?1 AND (?2 IS NULL OR tenant = ?2)
    UNION ALL
    SELECT r.id, r.previous, depth + 1 FROM chain JOIN responses AS r ON r.id = chain.previous
    WHERE depth < ?3 AND (?2 IS NULL OR r.tenant = ?2)
)
SELECT id, previous, depth FROM chain ORDER BY depth
"""
_EVICT = """
DELETE FROM responses WHERE id = (SELECT id FROM responses WHERE tenant = ? ORDER BY used LIMIT 1)
RETURNING tenant, bytes
"""
_EXPIRE = "DELETE FROM responses WHERE created < ? RETURNING tenant, bytes"
_DELETE = "DELETE FROM responses WHERE id = ?1 AND (?2 IS NULL OR tenant = ?2) RETURNING tenant, bytes"
_SIZES = "SELECT tenant, count(*), sum(bytes) FROM responses GROUP BY tenant"
_OF_ITEM = """
SELECT r.id FROM items JOIN responses AS r ON r.id = items.response
WHERE items.id = ?1 AND (?2 IS NULL OR r.tenant = ?2) AND r.created >= ?3 ORDER BY r.created DESC LIMIT 1
"""
_UNFINISHED = "SELECT id, response FROM responses WHERE status IN ('queued', 'in_progress')"

ResultT = TypeVar("ResultT")


class Record(NamedTuple):
    """A stored response: the ``tenant`` that owns it, its own input items, and the response object.

    ``events`` are its stream's, packed by `EventLog`; None if it was not streamed or has not ended.
    """

    tenant: str
    input: list[Stored]
    response: ResponseObject
    events: bytes | None = None

    def items(self) -> list[Stored]:
        """Its items, of the input and of the output."""
        return [*self.input, *self.response["output"]]


class BrokenChain(LookupError):
    """A response of a chain is not stored; its id is the argument."""


class ResponseStore:
    """Stored responses of all tenants. Where a method takes a ``tenant``, None means any.

    Args:
        path: the file; None keeps responses in memory until the server ends.
        max_bytes: limit of inputs and responses together.
        clock: Unix time in seconds.

    Raises:
        OSError: the file cannot be used: it is no such database, or another server uses it.
    """

    def __init__(self, path: Path | None, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._connection = open_database(
            path, LAYOUT, busy_seconds=1.0, isolation_level="DEFERRED", exclusive=True
        )
        try:
            self._end_unfinished()
            self._measure()
        except sqlite3.Error as error:
            raise OSError(f"{path}: {error}") from error
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "responses")

    def put(self, record: Record) -> Future[bool]:
        """Store a response, or its newer state; later calls see it. A closed store ignores it.

        The result says whether it is stored: it is not if the disk is full or the response too large.
        """
        if self._closed:
            ignored: Future[bool] = Future()
            ignored.set_result(False)
            return ignored
        return self._thread.submit(self._put, record)

    async def written(self) -> None:
        """Wait until all earlier `put` calls are written."""
        if not self._closed:
            await self._run(lambda: None)

    async def get(self, tenant: str | None, id: str) -> Record | None:
        """The response, if it is stored."""
        return await self._run(lambda: self._get(tenant, id))

    async def shown(self, tenant: str | None, id: str) -> bytes | None:
        """The JSON of the response object, if it is stored."""
        return await self._run(lambda: self._shown(tenant, id))

    async def events(self, id: str) -> bytes | None:
        """The packed events of a response; None if it has none."""
        return await self._run(lambda: self._events(id))

    async def item(self, tenant: str | None, id: str) -> Stored | None:
        """The item with this id of a stored response."""
        return await self._run(lambda: self._item(tenant, id))

    async def delete(self, tenant: str | None, id: str) -> bool:
        """Delete a response; return whether it existed."""
        return await self._run(lambda: self._delete(tenant, id))

    async def chain(self, tenant: str | None, id: str) -> list[Record]:
        """A response and those that it continues, oldest first.

        Raises:
            BrokenChain: one of them is not stored, or there are more than `MAX_CHAIN`.
        """
        return await self._run(lambda: self._chain(tenant, id))

    def close(self) -> None:
        """Write what is pending and close the database."""
        self._closed = True
        self._thread.shutdown()
        self._connection.close()

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.wrap_future(self._thread.submit(work))

    def _measure(self) -> None:
        """Count what is stored."""
        sizes = self._connection.execute(_SIZES).fetchall()
        self._sizes = {tenant: size for tenant, _, size in sizes}
        self._counts = {tenant: count for tenant, count, _ in sizes}

    def _put(self, record: Record) -> bool:
        try:
            return self._write(record)
        except sqlite3.Error as error:
            # The disk may be full: the transaction was undone, and so must be the counts.
            logger.error("response not stored: %s", error)
            self._measure()
            return False

    def _write(self, record: Record) -> bool:
        now, response = self._clock(), record.response
        given, shown = _dump(record.input), _dump(response)
        size = len(given) + len(shown) + len(record.events or b"")
        if size > self._max_bytes:
            logger.warning("response too large to store", extra={"fields": {"id": response["id"]}})
            return False
        row = (response["id"], record.tenant, response["previous_response_id"], now, now, size)
        with self._connection as connection:
            known = connection.execute(
                "SELECT bytes, tenant FROM responses WHERE id = ?", (response["id"],)
            ).fetchone()
            if known is not None and known[1] != record.tenant:
                logger.warning("the id belongs to another tenant", extra={"fields": {"id": response["id"]}})
                return False
            connection.execute(_PUT, (*row, response["status"], given, shown))
            names = {(item["id"], response["id"]) for item in record.items() if item.get("id")}
            connection.executemany("INSERT OR IGNORE INTO items VALUES (?, ?)", sorted(names))
            if record.events is not None:
                connection.execute("INSERT OR REPLACE INTO streams VALUES (?, ?)", (row[0], record.events))
            self._counts[record.tenant] = self._counts.get(record.tenant, 0) + (known is None)
            self._sizes[record.tenant] = self._sizes.get(record.tenant, 0) + size - (known[0] if known else 0)
            self._forget(connection.execute(_EXPIRE, (now - MAX_AGE_SECONDS,)).fetchall())
            for used, most in ((self._counts, MAX_RESPONSES), (self._sizes, self._max_bytes)):
                while sum(used.values()) > most:
                    largest = max(used, key=used.__getitem__)
                    self._forget(connection.execute(_EVICT, (largest,)).fetchall())
        return True

    def _forget(self, rows: list[tuple[str, int]]) -> None:
        """Subtract deleted rows from the totals."""
        for tenant, size in rows:
            self._counts[tenant] -= 1
            self._sizes[tenant] -= size
            if not self._counts[tenant]:
                del self._counts[tenant], self._sizes[tenant]

    def _get(self, tenant: str | None, id: str) -> Record | None:
        row = self._row(tenant, id)
        return None if row is None else Record(row[0], json.loads(row[1]), json.loads(row[2]))

    def _shown(self, tenant: str | None, id: str) -> bytes | None:
        row = self._row(tenant, id)
        return None if row is None else row[2]

    def _row(self, tenant: str | None, id: str) -> tuple[str, bytes, bytes] | None:
        """The owner, the input items and the response object of a stored response."""
        row: tuple[str, bytes, bytes] | None = self._connection.execute(
            "SELECT tenant, input, response FROM responses "
            "WHERE id = ?1 AND created >= ?2 AND (?3 IS NULL OR tenant = ?3)",
            (id, self._clock() - MAX_AGE_SECONDS, tenant),
        ).fetchone()
        return row

    def _events(self, id: str) -> bytes | None:
        row = self._connection.execute("SELECT events FROM streams WHERE id = ?", (id,)).fetchone()
        return None if row is None else row[0]

    def _item(self, tenant: str | None, id: str) -> Stored | None:
        row = self._connection.execute(_OF_ITEM, (id, tenant, self._clock() - MAX_AGE_SECONDS)).fetchone()
        record = None if row is None else self._get(tenant, row[0])
        items = [] if record is None else record.items()
        return next((item for item in items if item.get("id") == id), None)

    def _delete(self, tenant: str | None, id: str) -> bool:
        with self._connection as connection:
            rows = connection.execute(_DELETE, (id, tenant)).fetchall()
        self._forget(rows)
        return bool(rows)

    def _chain(self, tenant: str | None, id: str) -> list[Record]:
        rows = self._connection.execute(_CHAIN, (id, tenant, MAX_CHAIN)).fetchall()
        if not rows:
            raise BrokenChain(id)
        if rows[-1][1] is not None:
            raise BrokenChain(rows[-1][1])
        records = [self._get(tenant, row[0]) for row in rows]
        missing = next((row[0] for row, record in zip(rows, records, strict=True) if record is None), None)
        if missing is not None:
            raise BrokenChain(missing)
        now = self._clock()
        with self._connection as connection:
            connection.executemany(
                "UPDATE responses SET used = ? WHERE id = ?", [(now, row[0]) for row in rows]
            )
        return [record for record in reversed(records) if record is not None]

    def _end_unfinished(self) -> None:
        """Mark responses that were unfinished when the server ended as failed."""
        with self._connection as connection:
            for id, stored in connection.execute(_UNFINISHED).fetchall():
                error = {
                    "code": "server_error",
                    "message": "The server ended before the response was complete.",
                }
                response = json.loads(stored) | {"status": "failed", "error": error}
                connection.execute(
                    "UPDATE responses SET status = 'failed', response = ? WHERE id = ?", (_dump(response), id)
                )


def _dump(value: Any) -> bytes:
    return b"".join([piece.encode("utf-8", "surrogatepass") for piece in pieces(value)])


SEPARATOR = b"\n\n"


class EventLog:
    """The events of one response, numbered from 0, each as the bytes that a client receives.

    Any thread may add events; one event loop reads them.
    """

    def __init__(self, events: Iterable[bytes] = (), ended: bool = False) -> None:
        self._events = list(events)
        self._ended = ended
        self._grown = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def of(cls, packed: bytes) -> EventLog:
        """The log from the bytes that `packed` returned."""
        text = zlib.decompress(packed)
        return cls((event + SEPARATOR for event in text.split(SEPARATOR)[:-1]), ended=True)

    def packed(self) -> bytes:
        """The log as compressed bytes."""
        return zlib.compress(b"".join(self._events))

    @property
    def ended(self) -> bool:
        """Whether the log is complete."""
        return self._ended

    def append(self, event: bytes) -> None:
        """Add the next event."""
        self._events.append(event)
        self._wake()

    def end(self) -> None:
        """Mark the log as complete."""
        self._ended = True
        self._wake()

    async def after(self, seen: int) -> list[bytes]:
        """The events with numbers from ``seen`` on. Waits for the first one; empty if the log is complete before it."""
        self._loop = asyncio.get_running_loop()
        while len(self._events) <= seen and not self._ended:
            await self._grown.wait()
        return self._events[seen:]

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


class FollowedStream(Response):
    """The events of ``log`` with numbers from ``seen`` on."""

    def __init__(self, log: EventLog, seen: int, headers: Mapping[str, str]) -> None:
        super().__init__(media_type="text/event-stream", headers={**SSE_HEADERS, **headers})
        del self.headers["content-length"]
        self._log = log
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gone = asyncio.create_task(hung_up(receive))
        sender = asyncio.create_task(self._send_events(send))
        try:
            await asyncio.wait([gone, sender], return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
            else:
                record_error(scope, DISCONNECTED)
        finally:
            gone.cancel()
            sender.cancel()

    async def _send_events(self, send: Send) -> None:
        while True:
            try:
                events = await asyncio.wait_for(self._log.after(self._seen), PING_SECONDS)
            except TimeoutError:
                await send({"type": "http.response.body", "body": PING, "more_body": True})
                continue
            self._seen += len(events)
            if events:
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
            else:
                await send({"type": "http.response.body", "body": DONE, "more_body": False})
                return

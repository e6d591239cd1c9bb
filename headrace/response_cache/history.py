"""The request history: which requests recur, when, and what they cost; it survives restarts.

```
 asked, computed, cleared          flush, once a second, on its own thread
 ──────────────────────────> notes ───────────────────────────────────────────> SQLite (WAL)
        the loop only appends                                                       │
 the warmer  <────────────────────────── candidates, requests <────────────────────┘
```
Keys are hashed. Bodies are stored only with ``--record-history``; without them nothing can be warmed, but the counts
still show what warming would save. If the file cannot be written, only the history suffers.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headrace.files import Layout, connect, open_database, private_folder
from headrace.response_cache.partial import UnfinishedAnswer
from headrace.response_cache.query import CacheQuery
from headrace.response_cache.rules.entry import Entry, Served
from headrace.response_cache.rules.tags import tenant_of
from headrace.response_cache.rules.warming import Candidate, Demand, new_demand

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
BUSY_SECONDS = 5.0
MAX_NOTES = 50_000
"""Notes that may wait for the next flush; further ones are dropped, for example when the disk hangs."""

MOST_PREFIXES = 1000
"""Prefixes that are kept warm; of more, the tenant with most loses the one that it registered first."""

MOST_BODY_BYTES = 1 << 20
"""Longer bodies are not stored: the request is only counted."""

MOST_BYTES = 4 << 30
"""Size of the file from which the tenant with most bytes loses its oldest requests."""

_TABLES = """
CREATE TABLE IF NOT EXISTS questions (
    id INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE,
    first REAL NOT NULL, last REAL NOT NULL, times INTEGER NOT NULL, recent REAL NOT NULL,
    season BLOB NOT NULL, days BLOB NOT NULL,
    seconds REAL NOT NULL DEFAULT 0, tokens INTEGER NOT NULL DEFAULT 0,
    engine BLOB, fresh_until REAL NOT NULL DEFAULT 0,
    tenant TEXT NOT NULL, url TEXT, key_id TEXT, tenant_header TEXT, body BLOB
);
CREATE TABLE IF NOT EXISTS prefixes (
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, url TEXT, key_id TEXT, tenant_header TEXT, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS questions_last ON questions (last);
CREATE INDEX IF NOT EXISTS questions_of ON questions (tenant, last);
"""
LAYOUT = Layout("a request history", "questions", (_TABLES,), unnumbered=True)

Returned = TypeVar("Returned")


class Recorded(NamedTuple):
    """A recorded request: its route, its tenant (`key_id`, `tenant_header`), and its body."""

    url: str
    key_id: str | None
    tenant_header: str | None
    body: bytes


def read_recorded(path: Path) -> Iterator[tuple[Recorded, int, int]]:
    """The recorded requests of a history file, the first asked first: each with the number of times it was asked and
    the output tokens of its last response (0: it got none). The file may be in use, and its content is not changed.

    Raises:
        OSError: the file is not a history, or cannot be read.
    """
    try:
        rows = connect(path, BUSY_SECONDS)
        try:
            rows.execute("PRAGMA query_only = ON")
            for url, key_id, tenant_header, body, times, tokens in rows.execute(_RECORDED):
                yield Recorded(url, key_id, tenant_header, bytes(body)), times, tokens
        finally:
            rows.close()
    except sqlite3.Error as error:
        raise OSError(f"not a request history ({error})") from error


class _Asked(NamedTuple):
    key: bytes
    tenant: str
    at: float
    recorded: Recorded | None


class _Computed(NamedTuple):
    key: bytes
    seconds: float
    tokens: int
    engine: bytes
    fresh_until: float


class History:
    """The history in the file ``path``: at most ``max_requests`` requests in ``max_bytes``.

    Beyond that, the tenant that has most loses its oldest ones, so that no tenant evicts those of others.

    Raises:
        OSError: the file cannot be opened as a history.
    """

    def __init__(self, path: Path, max_requests: int = 100_000, max_bytes: int = MOST_BYTES) -> None:
        self.engine = b""
        """Fingerprint of the engine and its stores: responses of another one are not fresh."""
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._notes: list[_Asked | _Computed] = []
        self._dropped = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="headrace-history")
        self._flushing: asyncio.Task[None] | None = None
        private_folder(path.parent)
        self._rows = open_database(path, LAYOUT)

    # -- recording ---------------------------------------------------------------------------------

    def asked(self, key: bytes, tenant: str, at: float, recorded: Recorded | None) -> None:
        """A request arrived at the Unix time ``at``; ``recorded`` is given if its body may be stored."""
        self._note(_Asked(key, tenant, at, recorded))

    def computed(self, key: bytes, seconds: float, tokens: int, fresh_until: float) -> None:
        """`engine` computed a response of ``tokens`` in ``seconds``; it is fresh until ``fresh_until``."""
        self._note(_Computed(key, seconds, tokens, self.engine, fresh_until))

    def start(self) -> None:
        """Begin to write notes to the file; on the running loop."""
        self._flushing = asyncio.get_running_loop().create_task(self._flush_for_ever())

    async def stop(self) -> None:
        """Write all notes and close the file."""
        if self._flushing is not None:
            self._flushing.cancel()
        await self.flush()
        await self._on_worker(self._rows.close)
        self._worker.shutdown(wait=False)

    async def flush(self) -> None:
        """Write the notes made so far."""
        notes, self._notes = self._notes, []
        dropped, self._dropped = self._dropped, 0
        if dropped:
            logger.warning("the request history has dropped %d notes, because the disk is slow", dropped)
        if notes:
            try:
                # Shielded: `stop` may cancel a flush whose notes wait for the worker.
                await asyncio.shield(self._on_worker(lambda: self._write(notes)))
            except sqlite3.Error as error:
                logger.warning("the request history cannot be written: %s", error)

    # -- reading -----------------------------------------------------------------------------------

    async def candidates(self, now: float, most: int = 10_000) -> Sequence[Candidate]:
        """Recorded requests to which `engine` has no fresh response, the most recent first.

        A request that never got a complete response is not a candidate: it may not be cacheable.
        """
        await self.flush()
        return await self._on_worker(lambda: self._candidates(self.engine, now, most))

    async def recorded(self, key: bytes) -> Recorded | None:
        """A recorded request, or None if its body is not stored."""
        query = "SELECT url, key_id, tenant_header, body FROM questions WHERE key = ? AND body IS NOT NULL"
        row = await self._on_worker(lambda: self._rows.execute(query, (key,)).fetchone())
        return None if row is None else Recorded(*row)

    def forget(self, tenant: str) -> None:
        """Drop the requests and prefixes of a tenant soon, also those that are not written yet."""
        self._notes = [note for note in self._notes if not isinstance(note, _Asked) or note.tenant != tenant]
        for table in ("questions", "prefixes"):
            self._worker.submit(self._rows.execute, f"DELETE FROM {table} WHERE tenant = ?", (tenant,))

    async def register(self, tenant: str, prefix: Recorded) -> None:
        """Store a prefix to keep warm."""
        query = "INSERT INTO prefixes (tenant, url, key_id, tenant_header, body) VALUES (?, ?, ?, ?, ?)"
        await self._on_worker(lambda: self._rows.execute(query, (tenant, *prefix)))
        await self._on_worker(lambda: self._rows.execute(_TRIM_PREFIXES, {"most": MOST_PREFIXES}))

    async def prefixes(self) -> Sequence[Recorded]:
        """All registered prefixes, the first registered first."""
        query = "SELECT url, key_id, tenant_header, body FROM prefixes ORDER BY id"
        return [Recorded(*row) for row in await self._on_worker(lambda: self._rows.execute(query).fetchall())]

    # -- on the worker -----------------------------------------------------------------------------

    def _note(self, note: _Asked | _Computed) -> None:
        if len(self._notes) < MAX_NOTES:
            self._notes.append(note)
        else:
            self._dropped += 1

    async def _flush_for_ever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self.flush()

    async def _on_worker(self, work: Callable[[], Returned]) -> Returned:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _write(self, notes: Iterable[_Asked | _Computed]) -> None:
        with self._rows:
            self._rows.execute("BEGIN IMMEDIATE")  # rows read below must not change before they are written
            demands: dict[bytes, Demand] = {}
            bodies: dict[bytes, Recorded] = {}
            tenants: dict[bytes, str] = {}
            computed: list[_Computed] = []
            for note in notes:
                if isinstance(note, _Computed):
                    computed.append(note)
                    continue
                known = demands.get(note.key) or self._demand(note.key) or new_demand(note.at)
                demands[note.key] = known.asked(note.at)
                tenants[note.key] = note.tenant
                if note.recorded is not None and len(note.recorded.body) <= MOST_BODY_BYTES:
                    bodies[note.key] = note.recorded
            self._rows.executemany(
                _UPSERT, (_row(key, tenants[key], demand) for key, demand in demands.items())
            )
            self._rows.executemany(_BODIES, ((*recorded, key) for key, recorded in bodies.items()))
            self._rows.executemany(_COMPUTED, ((*note[1:], note.key) for note in computed))
            self._trim()

    def _trim(self) -> None:
        """Delete what exceeds the limits."""
        (count,) = self._rows.execute("SELECT count(*) FROM questions").fetchone()
        if count > self._max_requests:
            counts = dict(self._rows.execute("SELECT tenant, count(*) FROM questions GROUP BY tenant"))
            for tenant, least in _most(counts, count - self._max_requests).items():
                self._rows.execute(_OLDEST, (tenant, least))
        if self._used() > self._max_bytes:
            sizes = dict(self._rows.execute(_SIZES))
            while self._used() > self._max_bytes and sizes:
                tenant = max(sizes, key=sizes.__getitem__)
                rows = self._rows.execute(_OLDEST + " RETURNING length(body)", (tenant, 16)).fetchall()
                sizes[tenant] -= sum(size or 0 for (size,) in rows) + ROW_BYTES * len(rows)
                if not rows:
                    del sizes[tenant]

    def _used(self) -> int:
        """Bytes of the file that hold something."""
        pages, free, size = (
            self._rows.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def _demand(self, key: bytes) -> Demand | None:
        row = self._rows.execute(f"SELECT {_DEMAND} FROM questions WHERE key = ?", (key,)).fetchone()
        return None if row is None else _read(row)

    def _candidates(self, engine: bytes, now: float, most: int) -> Sequence[Candidate]:
        rows = self._rows.execute(
            f"SELECT key, seconds, {_DEMAND} FROM questions WHERE body IS NOT NULL AND engine IS NOT NULL "
            "AND (engine != ? OR fresh_until <= ?) ORDER BY last DESC LIMIT ?",
            (engine, now, most),
        )
        return [Candidate(key, _read(demand), seconds, seconds) for key, seconds, *demand in rows]


class HistoryListener:
    """A `response_cache.ports.CacheListener` that records the cost of responses, and until when they are fresh."""

    def __init__(self, history: History) -> None:
        self._history = history

    def stored(self, query: CacheQuery, entry: Entry) -> None:
        if query.origin:
            self._history.computed(query.origin, entry.seconds, len(entry.tokens), entry.expires)

    def interrupted(self, query: CacheQuery, beginning: UnfinishedAnswer) -> None:
        pass

    def cleared(self, tag: str) -> None:
        """Clearing a tenant deletes its recorded requests; other tags only make responses stale."""
        tenant = tenant_of(tag)
        if tenant is not None:
            self._history.forget(tenant)

    def barred(self, served: Served) -> None:
        pass


_RECORDED = """
SELECT url, key_id, tenant_header, body, times, tokens FROM questions WHERE body IS NOT NULL ORDER BY first, id
"""
_DEMAND = "first, last, times, recent, season, days"
_UPSERT = f"""
INSERT INTO questions (key, tenant, {_DEMAND}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET
first = excluded.first, last = excluded.last, times = excluded.times, recent = excluded.recent,
season = excluded.season, days = excluded.days
"""
_BODIES = "UPDATE questions SET url = ?, key_id = ?, tenant_header = ?, body = ? WHERE key = ?"
_COMPUTED = "UPDATE questions SET seconds = ?, tokens = ?, engine = ?, fresh_until = ? WHERE key = ?"
_OLDEST = """
DELETE FROM questions WHERE id IN (SELECT id FROM questions WHERE tenant = ? ORDER BY last LIMIT ?)
"""

ROW_BYTES = 500
"""What a request takes without its body, about."""
_SIZES = f"SELECT tenant, sum(ifnull(length(body), 0) + {ROW_BYTES}) FROM questions GROUP BY tenant"

_TRIM_PREFIXES = """
DELETE FROM prefixes WHERE (SELECT count(*) FROM prefixes) > :most AND id = (
    SELECT min(id) FROM prefixes WHERE tenant = (
        SELECT tenant FROM prefixes GROUP BY tenant ORDER BY count(*) DESC, min(id) LIMIT 1
    )
)
"""


def _most(counts: Mapping[str, int], excess: int) -> dict[str, int]:
    """How many of each tenant's requests to delete, ``excess`` in all, so that the largest counts become smallest."""
    level, left = 0, sum(counts.values()) - excess
    for number, count in enumerate(sorted(counts.values())):
        level = left // (len(counts) - number)
        if count > level:
            break
        left -= count
    taken = {tenant: count - level for tenant, count in counts.items() if count > level}
    spare = sum(taken.values()) - excess  # fewer than there are tenants in `taken`
    for tenant in [*taken][:spare]:
        taken[tenant] -= 1
    return taken


def _row(key: bytes, tenant: str, demand: Demand) -> tuple[object, ...]:
    season, days = array("d", demand.season).tobytes(), array("q", demand.days).tobytes()
    return (key, tenant, demand.first, demand.last, demand.times, demand.recent, season, days)


def _read(row: Sequence[Any]) -> Demand:
    first, last, times, recent, season, days = row
    return Demand(first, last, times, recent, tuple(array("d", season)), tuple(array("q", days)))

"""Files and batches: their fields and states as values, their metadata in SQLite, and the contents of files on disk.

```
FOLDER/batches.db            metadata: every change is one transaction that survives a killed process
FOLDER/lock                  held by the server that uses the folder
FOLDER/contents/file-…       contents
FOLDER/uploads/…             unfinished uploads; deleted at the next start
```
An upload becomes visible only when it is complete on disk. All calls block; make those of the metadata on one thread.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.tenancy.tenants import BACKGROUND, FLEX
from headrace.files import Layout, open_database, private_file, private_folder, private_opener

MINUTE = 60
HOUR = 3600
DAY = 86_400
MAX_WINDOW_SECONDS = 7 * DAY
MIN_WINDOW_SECONDS = MINUTE

URGENT_SHARE = 0.25
"""The last part of the completion window, in which a batch runs in the class flex instead of background."""

CLASSES = (BACKGROUND.name, FLEX.name)
"""The service classes that `service_class` chooses from."""

INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"


class BatchStatus(StrEnum):
    """The state of a batch, as in OpenAI's API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


_S = BatchStatus

NEXT: dict[BatchStatus, frozenset[BatchStatus]] = {
    _S.VALIDATING: frozenset({_S.IN_PROGRESS, _S.FAILED, _S.EXPIRED, _S.CANCELLING}),
    _S.IN_PROGRESS: frozenset({_S.FINALIZING, _S.FAILED, _S.EXPIRED, _S.CANCELLING}),
    _S.FINALIZING: frozenset({_S.COMPLETED}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.EXPIRED: frozenset(),
    _S.CANCELLED: frozenset(),
}
"""The states that may follow each state."""

OPEN = tuple(status for status, following in NEXT.items() if following)
"""States of batches that still have work to do."""


class FileRecord(NamedTuple):
    """A file's metadata; times are Unix seconds. Without ``expires_at``, it stays until it is deleted."""

    id: str
    tenant: str
    filename: str
    purpose: str
    nbytes: int
    created_at: int
    expires_at: int | None


class Totals(NamedTuple):
    """Lines of a batch that have ended, and the tokens that they used."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


NO_TOTALS = Totals()


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch.

    ``times`` has the Unix time at which each state began, by the state's name. ``window_seconds`` is the completion
    window, ``output_file_id`` and ``error_file_id`` are reserved when lines begin to run. ``has_output`` and
    ``has_errors`` say whether these files exist. ``output_seconds`` is the lifetime of both.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    window_seconds: int
    created_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    times: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    output_file_id: str = ""
    error_file_id: str = ""
    has_output: bool = False
    has_errors: bool = False
    total: int = 0
    totals: Totals = NO_TOTALS
    errors: tuple[dict[str, Any], ...] = ()

    @property
    def expires_at(self) -> int:
        """When the completion window ends."""
        return self.created_at + self.window_seconds

    def enter(self, status: BatchStatus, now: float, **changes: Any) -> BatchRecord:
        """The batch in its next state.

        Raises:
            ValueError: this state may not follow the current one.
        """
        if status not in NEXT[self.status]:
            raise ValueError(f"a batch that is {self.status} cannot become {status}")
        return replace(self, status=status, times={**self.times, status.value: int(now)}, **changes)

    def to_json(self) -> str:
        """The batch as JSON, for the store."""
        return json.dumps(asdict(self))


def batch_from_json(text: str) -> BatchRecord:
    """The batch that `BatchRecord.to_json` wrote."""
    values = json.loads(text)
    known = {each.name: values[each.name] for each in fields(BatchRecord) if each.name in values}
    known["status"] = BatchStatus(known["status"])
    known["totals"] = Totals(*known["totals"])
    known["errors"] = tuple(known["errors"])
    return BatchRecord(**known)


_WINDOW = re.compile(r"([1-9]\d{0,4})([mhd])")
_UNITS = {"m": MINUTE, "h": HOUR, "d": DAY}


def window_seconds(text: str) -> int | None:
    """The seconds of a completion window such as 24h; None if it is invalid, too short or too long."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    return seconds if MIN_WINDOW_SECONDS <= seconds <= MAX_WINDOW_SECONDS else None


def service_class(batch: BatchRecord, now: float) -> str:
    """The service class of a batch's lines: background, or flex near the end of the completion window."""
    urgent = now >= batch.expires_at - URGENT_SHARE * batch.window_seconds
    return FLEX.name if urgent else BACKGROUND.name


REMEMBERED_BATCHES = 10_000
"""Maximum batches of one tenant that are stored; the oldest ended ones are deleted first."""

_TABLES = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, nbytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE INDEX files_of ON files (tenant, seq);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, status TEXT NOT NULL,
    input_file_id TEXT NOT NULL, record TEXT NOT NULL
);
CREATE INDEX batches_of ON batches (tenant, seq);
CREATE INDEX batches_open ON batches (status);
"""
LAYOUT = Layout("a store of batches", "batches", (_TABLES,))
_FILE = "id, tenant, filename, purpose, nbytes, created_at, expires_at"
_OPEN = ", ".join(f"'{status.value}'" for status in OPEN)


class Limits(NamedTuple):
    """Limits of one tenant: files, their bytes, and batches that have not ended."""

    files: int
    nbytes: int
    batches: int


class QuotaExceeded(Exception):
    """A tenant's limit is reached; the message names it."""


class NotFound(LookupError):
    """The tenant has no such file or batch."""


class FileInUse(Exception):
    """The file is the input of a batch that has not ended."""


class BatchStore:
    """The database ``path``.

    Raises:
        OSError: the file cannot be used.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self._limits = limits
        self._db = open_database(path, LAYOUT, synchronous="FULL")

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def usage(self, tenant: str) -> tuple[int, int]:
        """A tenant's files and their bytes."""
        row = self._db.execute(
            "SELECT count(*), sum(nbytes) FROM files WHERE tenant = ?", (tenant,)
        ).fetchone()
        return int(row[0]), int(row[1] or 0)

    def check_upload(self, tenant: str, nbytes: int) -> None:
        """Check that a tenant may store one more file of ``nbytes``.

        Raises:
            QuotaExceeded: it may not.
        """
        files, used = self.usage(tenant)
        if files >= self._limits.files:
            raise QuotaExceeded(
                f"the tenant's limit of {self._limits.files} files is reached; delete some files"
            )
        if used + nbytes > self._limits.nbytes:
            limit = self._limits.nbytes
            raise QuotaExceeded(f"the tenant's limit of {limit} bytes is reached: {used} bytes are stored")

    def add_file(self, file: FileRecord) -> None:
        """Add an uploaded file.

        Raises:
            QuotaExceeded: the tenant may not store it.
        """
        with self._change():
            self.check_upload(file.tenant, file.nbytes)
            self._insert_file(file)

    def file(self, tenant: str, id: str) -> FileRecord:
        """One file.

        Raises:
            NotFound: the tenant has no such file.
        """
        query = f"SELECT {_FILE} FROM files WHERE id = ? AND tenant = ?"
        row = self._db.execute(query, (id, tenant)).fetchone()
        if row is None:
            raise NotFound(id)
        return FileRecord(*row)

    def files(
        self, tenant: str, *, limit: int, after: str | None, purpose: str | None, newest_first: bool
    ) -> list[FileRecord]:
        """A page of a tenant's files.

        Raises:
            NotFound: the tenant has no file ``after``.
        """
        where, values = ["tenant = ?"], [tenant]
        if purpose is not None:
            where.append("purpose = ?")
            values.append(purpose)
        order = "DESC" if newest_first else "ASC"
        if after is not None:
            seq = self._seq("files", tenant, after)
            where.append(f"seq {'<' if newest_first else '>'} {seq}")
        query = f"SELECT {_FILE} FROM files WHERE {' AND '.join(where)} ORDER BY seq {order} LIMIT {limit:d}"
        return [FileRecord(*row) for row in self._db.execute(query, values)]

    def remove_file(self, tenant: str, id: str) -> None:
        """Remove a file's metadata.

        Raises:
            NotFound: the tenant has no such file.
            FileInUse: a batch reads it.
        """
        with self._change():
            self.file(tenant, id)
            if self._db.execute(
                f"SELECT 1 FROM batches WHERE input_file_id = ? AND status IN ({_OPEN})", (id,)
            ).fetchone():
                raise FileInUse(id)
            self._db.execute("DELETE FROM files WHERE id = ?", (id,))

    def expire_files(self, now: float) -> list[str]:
        """Remove expired files, except those that a batch reads; returns their ids."""
        with self._change():
            query = f"""SELECT id FROM files WHERE expires_at <= ? AND id NOT IN
                        (SELECT input_file_id FROM batches WHERE status IN ({_OPEN}))"""
            ids = [str(row[0]) for row in self._db.execute(query, (int(now),))]
            self._db.executemany("DELETE FROM files WHERE id = ?", [(id,) for id in ids])
        return ids

    def file_ids(self) -> set[str]:
        """All files that must have contents: those of tenants, and outputs that are being written."""
        ids = {str(row[0]) for row in self._db.execute("SELECT id FROM files")}
        for batch in self.open_batches():
            ids |= {batch.output_file_id, batch.error_file_id}
        return ids - {""}

    def add_batch(self, batch: BatchRecord) -> None:
        """Add a batch.

        Raises:
            NotFound: the tenant has no such input file.
            QuotaExceeded: too many of the tenant's batches have not ended.
        """
        with self._change():
            if self.file(batch.tenant, batch.input_file_id).purpose != INPUT_PURPOSE:
                raise NotFound(batch.input_file_id)
            query = f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN ({_OPEN})"
            (unfinished,) = self._db.execute(query, (batch.tenant,)).fetchone()
            if unfinished >= self._limits.batches:
                raise QuotaExceeded(
                    f"the tenant's limit of {self._limits.batches} unfinished batches is reached"
                )
            self._db.execute(
                "INSERT INTO batches (id, tenant, status, input_file_id, record) VALUES (?, ?, ?, ?, ?)",
                (batch.id, batch.tenant, batch.status.value, batch.input_file_id, batch.to_json()),
            )
            self._db.execute(
                f"""DELETE FROM batches WHERE tenant = ? AND status NOT IN ({_OPEN}) AND seq <=
                    (SELECT seq FROM batches WHERE tenant = ? ORDER BY seq DESC LIMIT 1 OFFSET ?)""",
                (batch.tenant, batch.tenant, REMEMBERED_BATCHES),
            )

    def batch(self, tenant: str, id: str) -> BatchRecord:
        """One batch.

        Raises:
            NotFound: the tenant has no such batch.
        """
        row = self._db.execute(
            "SELECT record FROM batches WHERE id = ? AND tenant = ?", (id, tenant)
        ).fetchone()
        if row is None:
            raise NotFound(id)
        return batch_from_json(row[0])

    def batches(self, tenant: str, *, limit: int, after: str | None) -> list[BatchRecord]:
        """A page of a tenant's batches, newest first.

        Raises:
            NotFound: the tenant has no batch ``after``.
        """
        below = "" if after is None else f"AND seq < {self._seq('batches', tenant, after)}"
        query = f"SELECT record FROM batches WHERE tenant = ? {below} ORDER BY seq DESC LIMIT {limit:d}"
        return [batch_from_json(row[0]) for row in self._db.execute(query, (tenant,))]

    def open_batches(self) -> list[BatchRecord]:
        """All batches that have not ended, oldest first."""
        query = f"SELECT record FROM batches WHERE status IN ({_OPEN}) ORDER BY seq"
        return [batch_from_json(row[0]) for row in self._db.execute(query)]

    def change(
        self,
        tenant: str,
        id: str,
        change: Callable[[BatchRecord], BatchRecord],
        files: Sequence[FileRecord] = (),
    ) -> BatchRecord:
        """Change a batch and add its output ``files``, in one transaction.

        Raises:
            NotFound: the tenant has no such batch.
            ValueError: ``change`` raised it; nothing was changed.
        """
        with self._change():
            batch = change(self.batch(tenant, id))
            self._db.execute(
                "UPDATE batches SET status = ?, record = ? WHERE id = ?",
                (batch.status.value, batch.to_json(), id),
            )
            self._insert_outputs(files)
        return batch

    def _insert_outputs(self, files: Iterable[FileRecord]) -> None:
        for file in files:
            assert file.purpose == OUTPUT_PURPOSE
            self._insert_file(file)

    def _insert_file(self, file: FileRecord) -> None:
        self._db.execute(f"INSERT INTO files ({_FILE}) VALUES (?, ?, ?, ?, ?, ?, ?)", file)

    def _seq(self, table: str, tenant: str, id: str) -> int:
        row = self._db.execute(
            f"SELECT seq FROM {table} WHERE id = ? AND tenant = ?", (id, tenant)
        ).fetchone()
        if row is None:
            raise NotFound(id)
        return int(row[0])

    @contextmanager
    def _change(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


class Contents:
    """The folder; it is created if it is missing, and locked.

    Raises:
        BlockingIOError: another server uses it.
        OSError: it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()
        self._contents = self.folder / "contents"
        self._uploads = self.folder / "uploads"
        for each in (self.folder, self._contents, self._uploads):
            private_folder(each)
        self._lock = open(self.folder / "lock", "w", opener=private_opener)  # noqa: SIM115 (closed by close)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise BlockingIOError(f"another server uses {self.folder}") from error

    @property
    def database(self) -> Path:
        """The file of the metadata."""
        return self.folder / "batches.db"

    def path(self, id: str) -> Path:
        """The path of the contents of ``id``."""
        return self._contents / id

    def upload(self) -> Upload:
        """Begin to store a new file."""
        return Upload(self._uploads / secrets.token_hex(12))

    def remove(self, id: str) -> None:
        """Delete contents, if there are any."""
        self.path(id).unlink(missing_ok=True)

    def tidy(self, known: set[str]) -> None:
        """Delete unfinished uploads, and contents without metadata. Make the other contents private."""
        for left in (*self._uploads.iterdir(), *self._unknown(known)):
            left.unlink(missing_ok=True)
        for each in self._contents.iterdir():
            private_file(each)

    def close(self) -> None:
        """Release the folder."""
        self._lock.close()

    def _unknown(self, known: set[str]) -> Iterator[Path]:
        return (path for path in self._contents.iterdir() if path.name not in known)


class Upload:
    """A file that is being received, until `keep` or `drop`. Its calls block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "xb", buffering=0, opener=private_opener)  # noqa: SIM115 (closed by keep and drop)
        self.nbytes = 0

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self.nbytes += len(data)

    def sync(self) -> None:
        """Flush written data to the disk; this may take long."""
        os.fsync(self._file.fileno())

    def keep(self, path: Path) -> None:
        """Make the synced file the contents at ``path``."""
        self._file.close()
        self._path.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def drop(self) -> None:
        """Delete the received data; after `keep`, do nothing."""
        self._file.close()
        self._path.unlink(missing_ok=True)

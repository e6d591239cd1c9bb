"""Metadata of files and batches in SQLite: every change is one transaction that survives a killed process.

All calls block; make them on one thread. Contents of files are in `batch.contents`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from headrace.api.batch.records import (
    INPUT_PURPOSE,
    OPEN,
    OUTPUT_PURPOSE,
    BatchRecord,
    FileRecord,
    batch_from_json,
)
from headrace.files import Layout, open_database

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

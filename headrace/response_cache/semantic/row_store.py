"""A row of the semantic cache, an indexed request with its answer, and the SQLite file from which the index is rebuilt.

For one thread. Rows of another encoder are dropped, because all rows can be computed again. Responses always come from
the exact cache; a row without its entry is removed when it is found.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.files import Layout, open_database, private_folder

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

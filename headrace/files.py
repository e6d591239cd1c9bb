"""Files that the server writes: private ones, SQLite databases, and files that are replaced as a whole.

A private file, which only the server's user can read, has its permissions before its first byte is written. An
existing one loses the permissions of group and others and keeps everything else. A replaced file is the old one or the
new one after a crash or a full disk, never a part of it.

All SQLite databases are opened here, and each is private. A store says what its `Layout` is. `open_database` creates
the tables, converts a file of an older layout, renames a damaged one, and refuses a file that it must not change.

It also reads JSON from files of strangers, such as those of a checkpoint, within a limit.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = 32 << 20
"""The largest JSON file that is read. Parsed, it may take twenty times as much memory."""

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700

_MAGIC = b"SQLite format 3\0"
_BESIDE_DATABASE = ("-wal", "-shm", "-journal")
"""Endings of the files that SQLite writes beside a database. It creates them with the permissions of the database."""


def private_folder(path: Path) -> None:
    """Create a folder, and those of its parents that are missing, for the user of this process only.

    Raises:
        OSError: it cannot be created.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def private_opener(name: str, flags: int) -> int:
    """The ``opener`` of `open` for a file that only the user of this process can read.

    Raises:
        OSError: as `open`; or a stranger made the file or the link, see `private_file`.
    """
    _refuse_stranger(Path(name))
    file = os.open(name, flags, PRIVATE_FILE)
    _tighten(file, name)
    return file


def private_file(path: Path) -> Path:
    """Create a file for the user of this process only, or make an existing file so.

    Returns the path with links followed. Never opens an existing file, because closing it again would release the locks
    that SQLite holds on it.

    Raises:
        OSError: it cannot be created. In a folder in which all users can create files (``/tmp``), also if another user
            made the file or the link.
    """
    path = _existing(path)
    _tighten(path, path)
    return path


def _existing(path: Path) -> Path:
    """As `private_file`, but the permissions of an existing file stay."""
    _refuse_stranger(path)
    path = Path(os.path.realpath(path))
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))
    except FileExistsError:
        _refuse_stranger(path)
    return path


class Layout(NamedTuple):
    """The tables of one kind of database, and their version, which a file stores as ``user_version``.

    ``kind`` names it in messages ("a request history"); ``table`` is a table that every layout of it has. The first of
    the ``scripts`` creates layout number ``first``, each other one makes the next layout of the one before. Files of
    layouts before ``first`` are replaced like damaged ones. With ``unnumbered``, files from before the version was
    stored are read: their tables are those of the first script, which must not fail if they exist.
    """

    kind: str
    table: str
    scripts: tuple[str, ...]
    first: int = 1
    unnumbered: bool = False

    @property
    def newest(self) -> int:
        """The number of the layout that this version reads and writes."""
        return self.first + len(self.scripts) - 1


def open_database(
    path: Path | None,
    layout: Layout,
    *,
    busy_seconds: float = 5.0,
    isolation_level: Literal["DEFERRED"] | None = None,
    synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
    exclusive: bool = False,
    thoroughly: bool = False,
) -> sqlite3.Connection:
    """A connection, for any thread, to a private database with the tables of ``layout`` and a write-ahead log.

    A damaged file is renamed to ``PATH.damaged`` and a new one is created. A file that is not ours stays as it is.

    Args:
        path: the file; None for a database in memory.
        layout: its tables.
        busy_seconds: how long a call waits for the transaction of another connection.
        isolation_level: as in `sqlite3.connect`.
        synchronous: FULL if a committed change must survive a power cut.
        exclusive: no other connection may use the file.
        thoroughly: search the whole file for damage, not only its beginning.

    Raises:
        OSError: the file cannot be used: it is no database or another program's, a newer version of Headrace wrote it,
            or it is in use; or as `private_file`.
    """

    def opened() -> sqlite3.Connection:
        connection = _connect(path, busy_seconds, isolation_level)
        try:
            if exclusive:
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # before anything is read
            _prepare(connection, path, layout, thoroughly)
            connection.execute(f"PRAGMA synchronous = {synchronous}")
        except BaseException:
            connection.close()
            raise
        return connection

    try:
        try:
            return opened()
        except sqlite3.DatabaseError as error:
            if path is None or not is_damaged(error):
                raise
            if not _begins_as_database(path):
                raise OSError(
                    f"{path} is no database, so it is not {layout.kind}; give another path"
                ) from error
            _set_aside(path, layout.kind, error)
        return opened()
    except sqlite3.Error as error:
        raise OSError(f"{path} cannot be used as {layout.kind}: {error}") from error


def connect(path: Path, busy_seconds: float) -> sqlite3.Connection:
    """A further connection to a database that `open_database` has prepared.

    Raises:
        OSError: as `private_file`; also if a stranger made one of the files that SQLite has beside a database.
        sqlite3.Error: it cannot be opened.
    """
    connection = _connect(path, busy_seconds, None)
    try:
        _make_private(path)
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(
    path: Path | None, busy_seconds: float, isolation_level: Literal["DEFERRED"] | None
) -> sqlite3.Connection:
    """A connection to a file, or to a new database in memory."""
    if path is not None:
        path = _existing(path)
        for each in _BESIDE_DATABASE:  # SQLite would write a stranger's journal into the database
            _refuse_stranger(path.with_name(path.name + each))
    return sqlite3.connect(
        path or ":memory:", timeout=busy_seconds, isolation_level=isolation_level, check_same_thread=False
    )


def _make_private(path: Path) -> None:
    """Take the permissions of group and others from a database and the files that SQLite has beside it."""
    path = private_file(path)
    for each in _BESIDE_DATABASE:
        with suppress(FileNotFoundError):
            _tighten(path.with_name(path.name + each), path)


def _begins_as_database(path: Path) -> bool:
    """Whether a file begins as a database, or with the zeros that a power cut leaves, and not as any other file."""
    # Closing a file drops the locks that this process has on it; SQLite cannot read this one, so there are none.
    with path.open("rb") as file:
        begin = file.read(len(_MAGIC))
    return _MAGIC.startswith(begin) or not any(begin)


def is_damaged(error: Exception) -> bool:
    """Whether a call failed because the file is damaged, and not only locked, full or missing."""
    return isinstance(error, sqlite3.DatabaseError) and error.sqlite_errorcode & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    )


def _prepare(connection: sqlite3.Connection, path: Path | None, layout: Layout, thoroughly: bool) -> None:
    """Check the file before anything in it is changed; then give it the newest layout."""
    version = _version(connection, path, layout)
    if path is not None:
        _make_private(path)
    if 0 < version < layout.first:
        raise _damage(f"its layout {version} is not read any more")
    if thoroughly and (report := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise _damage(report)
    connection.execute("PRAGMA journal_mode = WAL")
    if version == layout.newest:
        return
    connection.execute("BEGIN IMMEDIATE")
    version = _version(connection, path, layout)  # read again: two processes may start at once
    for script in layout.scripts[version and version - layout.first + 1 :]:
        for statement in _statements(script):
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {layout.newest}")
    connection.execute("COMMIT")


def _version(connection: sqlite3.Connection, path: Path | None, layout: Layout) -> int:
    """The number of the file's layout: 0 for a new file.

    Raises:
        OSError: this program must not change the file.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and (layout.table not in tables or not (version or layout.unnumbered)):
        raise OSError(f"{path} is the database of another program, not {layout.kind}")
    if version > layout.newest:
        raise OSError(
            f"{path} was written by a newer version of Headrace: it has layout {version} of {layout.kind}, and this "
            f"version reads layout {layout.newest}"
        )
    return int(version)


def _damage(reason: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(reason)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _statements(script: str) -> Iterator[str]:
    """The statements of a script. `sqlite3.Connection.executescript` would commit before it runs them."""
    statement = ""
    for part in script.split(";"):
        statement += part
        if statement.strip() and sqlite3.complete_statement(statement + ";"):  # not inside of a trigger
            yield statement
            statement = ""
        elif statement.strip():
            statement += ";"


def _set_aside(path: Path, kind: str, error: sqlite3.Error) -> None:
    """Rename a damaged database and the files beside it, so that what is left of it can be read."""
    path = private_file(path)  # follows links
    aside = path.with_name(f"{path.name}.damaged")
    logger.warning("%s is damaged (%s): it is renamed to %s, and %s begins empty", path, error, aside, kind)
    for each in _BESIDE_DATABASE:
        path.with_name(aside.name + each).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            path.with_name(path.name + each).replace(path.with_name(aside.name + each))
    path.replace(aside)


def _tighten(file: Path | int, name: Path | str) -> None:
    """Take the permissions of group and others from a regular file."""
    found = os.stat(file)
    if not stat.S_ISREG(found.st_mode) or not found.st_mode & 0o077:
        return
    try:
        os.chmod(file, stat.S_IMODE(found.st_mode) & PRIVATE_FOLDER)
    except OSError as error:
        logger.warning("other users can read %s, and its mode cannot be changed: %s", name, error.strerror)


def _refuse_stranger(path: Path) -> None:
    """Raise OSError if a stranger may have put a file or a link there for this process to write to.

    The rule is that of Linux' ``protected_symlinks``, which not every machine has on.
    """
    path = path.absolute()
    for each in (path, *(folder for folder in path.parents if folder.is_symlink())):
        folder = os.stat(each.parent) if each.parent.is_dir() else None
        if folder is None or not (folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH):
            continue
        with suppress(FileNotFoundError):
            if os.lstat(each).st_uid not in (os.geteuid(), folder.st_uid):
                raise OSError(
                    errno.EPERM, f"another user made it in {each.parent}, where all users can", each
                )


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A binary file to write; at the end of the block it takes the place of ``path``, unless the block raised.

    Creates the folder. A new file has the permissions ``mode`` less the umask. A replaced one keeps its own, without
    those of group and others if ``mode`` is `PRIVATE_FILE`. Pipes and devices (``/dev/stdout``) cannot be replaced and
    are written directly; a link is followed.

    Raises:
        OSError: the file cannot be written; or a stranger made it or a link on the way to it, see `private_file`.
    """
    _refuse_stranger(path)
    if path.exists() and not path.is_file():  # before links are followed: that of a pipe leads to no path
        with path.open("wb") as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # of a process that was killed
    try:
        with open(new, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            if path.exists():
                kept = stat.S_IMODE(path.stat().st_mode)
                os.fchmod(file.fileno(), kept & PRIVATE_FOLDER if mode == PRIVATE_FILE else kept)
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def replace_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Replaces a file by one with this text in UTF-8, with permissions as in `replacing`.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path, mode) as file:
        file.write(text.encode())


def read_json_file(path: Path) -> Any:
    """The value in a JSON file of at most `MAX_JSON_BYTES`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, nested too deeply, or not JSON; the message does not name the file.
    """
    check_size(path, MAX_JSON_BYTES)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None


def check_size(path: Path, limit: int) -> None:
    """Raise ValueError if a file has more than ``limit`` bytes."""
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"it has {size:,} bytes, and the limit is {limit:,}")

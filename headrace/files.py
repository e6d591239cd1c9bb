"""Files that the server writes: private ones, which only its user can read, and files that are replaced as a whole.

A private file has its permissions before its first byte is written. An existing one loses the permissions of group and
others and keeps everything else. All SQLite databases are opened here. A replaced file is the old one or the new one
after a crash or a full disk, never a part of it.

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
from typing import IO, Any, Literal

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = 32 << 20
"""The largest JSON file that is read. Parsed, it may take twenty times as much memory."""

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700

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
    _refuse_stranger(path)
    path = Path(os.path.realpath(path))
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))
    except FileExistsError:
        _refuse_stranger(path)
        _tighten(path, path)
    return path


def open_database(
    path: Path, timeout: float = 5.0, isolation_level: Literal["DEFERRED"] | None = None
) -> sqlite3.Connection:
    """A connection, for any thread, to a database that only the user of this process can read.

    Raises:
        OSError: as `private_file`; also if a stranger made one of the files that SQLite has beside a database.
        sqlite3.Error: it cannot be opened.
    """
    path = private_file(path)
    for each in _BESIDE_DATABASE:
        beside = path.with_name(path.name + each)
        _refuse_stranger(beside)  # SQLite would write a stranger's journal into the database
        with suppress(FileNotFoundError):
            _tighten(beside, path)
    return sqlite3.connect(path, timeout=timeout, isolation_level=isolation_level, check_same_thread=False)


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

"""Replaces a file as a whole: a crash or a full disk leaves the old file or the new one, never a part of it.

It also reads JSON from files of strangers, such as those of a checkpoint, within a limit.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

MAX_JSON_BYTES = 32 << 20
"""The largest JSON file that is read. Parsed, it may take twenty times as much memory."""


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A binary file to write; at the end of the block it takes the place of ``path``, unless the block raised.

    Creates the folder. A new file has the permissions ``mode`` less the umask, a replaced one keeps its own. Pipes and
    devices (``/dev/stdout``) cannot be replaced and are written directly; a link is followed.

    Raises:
        OSError: the file cannot be written.
    """
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
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replaces a file by one with this text in UTF-8.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as file:
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

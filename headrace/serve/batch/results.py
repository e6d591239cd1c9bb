"""The output file of a batch: every result exactly once, whenever the process is killed.

A result counts when its line is complete in the file, including the line break. When the file is opened again, an
incomplete last line of a killed process is cut off, and its request runs again. All other results are known by their
key and do not run again. Writes go straight to the operating system, so a killed process loses nothing. ``fsync``
follows in batches and limits the loss in a power failure.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.serve.batch.lines import result_key, succeeded

SYNC_LINES = 256
SYNC_SECONDS = 1.0


class ResultsError(ValueError):
    """An output file that cannot be continued."""


class Results:
    """An output file, open for appending and locked against a second run.

    Attributes:
        keys: the keys of the results in the file.
        failed: the number of them that are errors.

    Raises:
        ResultsError: another process writes to the file, or it contains something other than results.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.keys: set[str] = set()
        self.failed = 0
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
        try:
            self._lock()
            self._recover()
        except BaseException:
            self._file.close()
            raise
        self._unsynced = 0
        self._synced_at = time.monotonic()

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, result: dict[str, Any]) -> None:
        """Write one result.

        Raises:
            ResultsError: the file already has a result of this line, or cannot be written.
        """
        key = result_key(result)
        if key in self.keys:
            raise ResultsError(f"{self.path} already has a result for {key!r}")
        # A lone surrogate becomes backslash-u and four digits, as in JSON.
        text = json.dumps(result, ensure_ascii=False).encode("utf-8", "backslashreplace")
        line = memoryview(text + b"\n")
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise ResultsError(f"{self.path} cannot be written: {error.strerror}") from error
        self._count(key, result)
        self._unsynced += 1
        if self._unsynced >= SYNC_LINES or time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Flush what was written to the disk."""
        os.fsync(self._file.fileno())
        self._unsynced = 0
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Sync and close the file."""
        if not self._file.closed:
            self.sync()
            self._file.close()

    def _count(self, key: str, result: dict[str, Any]) -> None:
        self.keys.add(key)
        self.failed += not succeeded(result)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResultsError(f"another process is writing to {self.path}") from error

    def _recover(self) -> None:
        whole = 0  # bytes up to the end of the last whole line
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                result = _parse(line)
                if result is None:
                    raise ResultsError(
                        f"{self.path}, line {number}: not a result of a batch; is it the right file?"
                    )
                key = result_key(result)
                if key in self.keys:
                    raise ResultsError(f"{self.path}, line {number}: a second result for {key!r}")
                self._count(key, result)
                whole += len(line)
        self._file.truncate(whole)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    is_result = isinstance(value, dict) and {"id", "custom_id", "response", "error"} <= value.keys()
    return value if is_result else None

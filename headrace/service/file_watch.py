"""Calls a function when files have changed, by polling their times, sizes and inodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

POLL_SECONDS = 2.0
"""Interval of the checks."""

Version = tuple[int, int, int]
"""Modification time in nanoseconds, size in bytes, and inode, which differs if the file was replaced."""


class FileWatch:
    """Watches ``files`` and calls ``changed`` on a worker thread once they have been the same for one poll.

    A partly written file is therefore not read. The call is not repeated until a file changes again. Without files it
    does nothing.
    """

    def __init__(
        self, files: Sequence[str], changed: Callable[[], object], poll_seconds: float = POLL_SECONDS
    ) -> None:
        self._files = tuple(files)
        self._changed = changed
        self._poll_seconds = poll_seconds
        self._read = self._seen = self._versions()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch; on the running loop."""
        if self._files:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """End watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def reading(self) -> None:
        """The files are being read now: call it before, so that a later change is found by the next poll."""
        self._read = self._seen = self._versions()

    def check(self) -> None:
        """Check the files once."""
        versions, seen = self._versions(), self._seen
        self._seen = versions
        if versions != self._read and versions == seen:
            self._read = versions
            self._changed()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            await asyncio.to_thread(self.check)

    def _versions(self) -> tuple[Version | None, ...]:
        return tuple(map(_version, self._files))


def _version(file: str) -> Version | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

"""Reads the API key file again when it changes, so that keys can be rotated without a restart.

If the file cannot be used, the previous keys stay valid and the error is logged once. Running streams always continue.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping

from headrace.serve.auth.api_keys import Grant, Keys
from headrace.serve.auth.roles import Role

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""Interval of the checks of the file's time and size."""

Version = tuple[int, int, int]
"""Modification time in nanoseconds, size in bytes, and inode, which differs if the file was replaced."""


class KeyFile:
    """Owns the server's `keys` and watches ``file``; ``read`` returns all keys, including those of options.

    A changed file is read once it has not changed for one poll, so that a partly written file is not used. `reload`
    reads it at once.

    Raises:
        ValueError: the keys cannot be used, see `read_keys`.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, Grant]],
        file: str | None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._read = read
        self._file = file
        self._poll_seconds = poll_seconds
        self._loaded = self._seen = (
            self._version()
        )  # before reading: a change in between is found at the next poll
        self.keys = Keys(read())
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch; on the running loop."""
        if self._file is not None:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """End watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def reload(self) -> bool:
        """Read the keys now; return whether they are valid. If not, the error is logged and the old keys stay valid."""
        self._loaded = self._seen = self._version()
        try:
            keys = self._read()
        except ValueError as error:
            logger.warning("API keys not reloaded, the previous keys stay valid: %s", error)
            return False
        self.keys.replace(keys)
        counts = self.keys.count()
        logger.info("API keys reloaded: %s", ", ".join(f"{counts[role]} {role}" for role in Role))
        return True

    def check(self) -> None:
        """Check the file once: read it if it differs from the loaded one and has not changed since the last check."""
        version, seen = self._version(), self._seen
        self._seen = version
        if version != self._loaded and version == seen:
            self.reload()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            await asyncio.to_thread(self.check)

    def _version(self) -> Version | None:
        if self._file is None:
            return None
        try:
            found = os.stat(self._file)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

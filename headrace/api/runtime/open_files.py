"""The limit on open files: raised at start, and reported when connections come close to it.

At the limit itself a new connection would be closed without an answer, and files could not be opened.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable

logger = logging.getLogger(__name__)

WANTED_FILES = 65_536
"""Limit that is asked for if the system permits it: each connection is an open file."""

RESERVED_SHARE = 8
RESERVED_FILES = 256
"""An eighth of the limit, at most 256, stays free for files of the caches and for refusing connections."""

WARN_SECONDS = 60.0
_OPEN_FILES = ("/proc/self/fd", "/dev/fd")


class ConnectionRoom:
    """Decides whether a further connection fits ``limit`` open files, of which ``others`` are no connections."""

    def __init__(self, limit: int, others: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._most = max(1, limit - others - min(RESERVED_FILES, limit // RESERVED_SHARE))
        self._clock = clock
        self._warned = -WARN_SECONDS

    def admits(self, connections: int) -> bool:
        """Whether ``connections``, the new one included, fit; the log says so at most once a minute if not."""
        if connections <= self._most:
            return True
        if (now := self._clock()) - self._warned >= WARN_SECONDS:
            self._warned = now
            logger.warning(
                "new connections are refused: %d are open, and the limit of open files is %d; raise it with "
                "ulimit -n, LimitNOFILE= or --ulimit nofile=",
                connections - 1,
                self._limit,
            )
        return False


def open_room(clock: Callable[[], float]) -> ConnectionRoom:
    """Raise the limit of open files as far as the system permits, and return the room that it leaves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    return ConnectionRoom(limit, _count_open(), clock)


def _count_open() -> int:
    for folder in _OPEN_FILES:
        if os.path.isdir(folder):
            return len(os.listdir(folder))
    return 0

"""Waits for a folder that the previous process still locks, because it drains or because its machine has failed.

A folder is locked by ``flock``. The kernel releases the lock when its process ends, and a file server (NFS) some time
after the machine of its process has failed. So it is enough to wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger("headrace.startup")

RETRY_SECONDS = 0.2

T = TypeVar("T")


def when_free(take: Callable[[], T], seconds: float, folder: str) -> T:
    """The result of ``take``, once no other process locks ``folder``; waits for at most ``seconds``.

    Raises:
        BlockingIOError: it is still locked after that.
        OSError: ``take`` failed for another reason.
    """
    until = time.monotonic() + seconds
    waiting = False
    while True:
        try:
            return take()
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
        if not waiting:
            logger.info("waiting up to %g s for %s, which another process uses", seconds, folder)
            waiting = True
        time.sleep(RETRY_SECONDS)

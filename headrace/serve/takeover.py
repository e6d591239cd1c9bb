"""Waits for a folder that the previous process still holds: one that drains, or one whose machine is gone.

A folder is locked by ``flock``. The kernel releases the lock when its process ends, and a file server (NFS) some time
after the machine of its process has gone, so there is nothing to repair here but the time.
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
    """What ``take`` returns, as soon as no other process holds ``folder``, after at most ``seconds``.

    Raises:
        BlockingIOError: it is still held then.
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

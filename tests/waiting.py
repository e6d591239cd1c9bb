"""Waits of tests for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

FoundT = TypeVar("FoundT")


def eventually(condition: Callable[[], FoundT], seconds: float = 60.0, rest: float = 0.02) -> FoundT:
    """What ``condition`` gives once that is true; it is asked every ``rest`` seconds.

    Fails after ``seconds``: only a fault takes so long.
    """
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, f"not within {seconds} seconds"
        time.sleep(rest)
    return found

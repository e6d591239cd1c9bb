"""The side of a process of `bounded`: it answers the jobs that it reads, within the limits of each.

Signals of timers end it in the middle of whatever it does, since nothing handles them. `bounded` reads why it ended,
and starts another.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headrace.text.bounded import Limits, Stop

LOWER_PRIORITY = 10
KEPT_BYTES = 64 << 20
"""Maximum growth of a process by the jobs that it has done; beyond it, the process ends."""

Answer = tuple[dict[str, Any], bytes]
"""The line and the bytes of an answer."""
Work = Callable[[bytes, Limits, dict[str, Any]], Answer]
"""Answers a job: its payload, its limits and its options."""


class TooMuchOutput(Exception):
    """The answer exceeds ``output_bytes``."""


def serve(work: Work, payload_times: int) -> None:
    """Answer jobs until standard input ends; each may take ``payload_times`` its bytes of memory beside its limit."""
    # of a terminal; the server ends by it, and this process after it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(LOWER_PRIORITY)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    gc.freeze()
    own = _own_bytes()
    for line in sys.stdin.buffer:
        head = json.loads(line)
        limits = Limits(*head["limits"])
        _limit(resource.RLIMIT_AS, own + limits.memory_bytes + payload_times * head["bytes"])
        payload = sys.stdin.buffer.read(head["bytes"])
        answer, data = _timed(work, payload, limits, head["options"])
        del payload
        answer |= {"full": _own_bytes() - len(data) > own + KEPT_BYTES, "bytes": len(data)}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        del data


def _timed(work: Work, payload: bytes, limits: Limits, options: dict[str, Any]) -> Answer:
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
    try:
        return work(payload, limits, options)
    except TooMuchOutput:
        return {"stopped": Stop.OUTPUT.name}, b""
    except MemoryError:
        return {"stopped": Stop.MEMORY.name}, b""
    finally:
        # What a job left in cycles must not count for the next one, which may be another tenant's.
        gc.collect()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit(kind: int, most: int) -> None:
    """Set the soft limit; systems that cannot hold it leave the others."""
    with suppress(OSError, ValueError):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _own_bytes() -> int:
    """The address space that this process has now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 30

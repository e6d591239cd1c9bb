"""Processes for work that may hang or fill the memory: the operating system ends them at their limits, and the next
job gets a new one. They start when they are needed, with an empty environment.

A job and its answer are a line of JSON each, and the bytes that it announces.

```
 server ── a line, bytes ──▶ a module that calls `serve` ── a line, bytes ──▶ server
```
"""

from __future__ import annotations

import fcntl
import gc
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from threading import Lock
from typing import Any, NamedTuple

MAX_IDLE = 2
"""Processes that wait for the next job; more than these end after theirs."""

_PIPE_BYTES = 1 << 20  # of answers: fewer calls to read pixels


class Limits(NamedTuple):
    """The limits of one job.

    ``cpu_seconds`` and ``wall_seconds`` of its process; ``memory_bytes`` beside those of the process and of the job;
    ``output_bytes`` beside a multiple of the job, where the module has such a limit.
    """

    cpu_seconds: float = 0.5
    wall_seconds: float = 5.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20


class Stop(StrEnum):
    """The limit that stopped a job."""

    CPU = "it needs more than {0.cpu_seconds:g} s of CPU time"
    WALL = "it took more than {0.wall_seconds:g} s"
    MEMORY = "it needs more than {0.memory_bytes} bytes of memory"
    OUTPUT = "it writes more than {0.output_bytes} bytes beside its messages"
    ENDED = "its process ended"


class Stopped(Exception):
    """A job that reached a limit: which one."""


class BoundedProcesses:
    """Processes of one module, one job at a time each. A call blocks its thread; as many run as threads call."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = Lock()

    def ask(self, payload: bytes, limits: Limits, **options: Any) -> tuple[dict[str, Any], bytes | mmap.mmap]:
        """The line and the bytes of the answer to a job.

        Raises:
            Stopped: it reached a limit.
        """
        line = json.dumps({"options": options, "limits": limits, "bytes": len(payload)}).encode() + b"\n"
        process = self._take()
        try:
            answer, data = _exchange(process, line, payload)
        except BaseException:
            _end(process)
            raise
        if "stopped" in answer or answer["full"]:
            _end(process)
        else:
            self._give_back(process)
        if "stopped" in answer:
            raise Stopped(Stop[answer["stopped"]].format(limits))
        return answer, data

    def close(self) -> None:
        """End the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)

    def _take(self) -> subprocess.Popen[bytes]:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _end(process)
        return _start(self._module)

    def _give_back(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(process)
                return
        _end(process)


def _start(module: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": path, "LC_ALL": "C.UTF-8", "TZ": _time_zone()},
    )
    with suppress(OSError, AttributeError):  # other systems, or a user with many pipes
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)  # type: ignore[arg-type]
    return process


def _time_zone() -> str:
    """The server's time zone, as the variable ``TZ`` of POSIX writes it."""
    now = time.localtime()
    west = abs(now.tm_gmtoff) // 60
    return f"<{now.tm_zone}>{'-' if now.tm_gmtoff > 0 else '+'}{west // 60:02}:{west % 60:02}"


def _exchange(
    process: subprocess.Popen[bytes], line: bytes, payload: bytes
) -> tuple[dict[str, Any], bytes | mmap.mmap]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.write(payload)
        process.stdin.flush()
        head = process.stdout.readline()
        answer: dict[str, Any] = json.loads(head) if head.endswith(b"\n") else {"bytes": -1}
        data = _read(process.stdout, answer["bytes"])
    except BrokenPipeError:
        data = None
    if data is None:
        process.kill()
        return {"stopped": _why(process.wait()).name}, b""
    return answer, data


def _read(pipe: Any, size: int) -> bytes | mmap.mmap | None:
    """``size`` bytes, or None if the pipe has fewer; without a copy, which would hold the interpreter's lock."""
    if size <= 0:
        return b"" if size == 0 else None
    data = mmap.mmap(-1, size)
    return data if pipe.readinto(data) == size else None


def _why(code: int) -> Stop:
    """Why the process ended, by its exit code."""
    return {-signal.SIGPROF: Stop.CPU, -signal.SIGALRM: Stop.WALL}.get(code, Stop.ENDED)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


# -- in such a process
#
# It answers the jobs that it reads, within the limits of each. Signals of timers end it in the middle of whatever it
# does, since nothing handles them. The server reads why it ended, and starts another.

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

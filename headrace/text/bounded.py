"""Processes for work that may hang or fill the memory: the operating system ends them at their limits, and the next
job gets a new one. They start when they are needed, with an empty environment.

A job and its answer are a line of JSON each, and the bytes that it announces.

```
 server ── a line, bytes ──▶ a module that calls `bounded_process.serve` ── a line, bytes ──▶ server
```
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
import time
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

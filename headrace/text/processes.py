"""Renders chat templates in processes of their own, which are ended at their limits of time and memory.

A template that a client sent, or that exceeds the `Budget` of the server's process, can hold the interpreter's lock in
one call inside C for minutes, or fill the memory. Here it can do so: the operating system ends the process, and the
next template gets a new one. Processes start when they are needed, with an empty environment and a low priority.

```
 server ── one line of JSON: a Job ──▶ render_process ── one line of JSON, and the text that it announces ──▶ server
```
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from threading import Lock
from typing import Any, NamedTuple

from headrace.text.content import PromptText
from headrace.text.rendering import Job, TemplateError

MAX_IDLE = 2
"""Processes that wait for the next template; more than these end after theirs."""


class Limits(NamedTuple):
    """The limits of one rendering.

    ``cpu_seconds`` and ``wall_seconds`` of its process; ``memory_bytes`` beside those of the process and of the
    messages; ``output_bytes`` beside a multiple of the messages.
    """

    cpu_seconds: float = 0.5
    wall_seconds: float = 5.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20


class Stop(StrEnum):
    """The limit that stopped a template."""

    CPU = "it needs more than {0.cpu_seconds:g} s of CPU time"
    WALL = "it took more than {0.wall_seconds:g} s"
    MEMORY = "it needs more than {0.memory_bytes} bytes of memory"
    OUTPUT = "it writes more than {0.output_bytes} bytes beside its messages"
    ENDED = "its process ended"


DEFAULT_LIMITS = Limits()


class TemplateStopped(TemplateError):
    """A template that reached a limit."""


class RenderProcesses:
    """Processes that render templates, one at a time each. A call blocks its thread; as many run as threads call."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = Lock()

    def render(self, job: Job) -> PromptText:
        """The prompt of ``job``.

        Raises:
            TemplateError: as in `rendering.render_job`; `TemplateStopped` if it reached a limit.
        """
        answer, text = self._ask({"job": job._asdict() | {"controls": job.controls._asdict()}})
        return PromptText(text, tuple((start, end) for start, end in answer["quoted"]))

    def variables(self, source: str) -> frozenset[str]:
        """As `rendering.variables_of`."""
        return frozenset(self._ask({"variables_of": source})[0]["variables"])

    def close(self) -> None:
        """End the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)

    def _ask(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        try:
            line = json.dumps(question).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise TemplateError(f"the messages cannot be written as JSON: {error}") from error
        process = self._take()
        try:
            answer, text = _exchange(process, line)
        except BaseException:
            _end(process)
            raise
        if "stopped" in answer or answer["full"]:
            _end(process)
        else:
            self._give_back(process)
        if "stopped" in answer:
            why = Stop[answer["stopped"]].format(self._limits)
            raise TemplateStopped(f"the chat template was stopped: {why}")
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer, text

    def _take(self) -> subprocess.Popen[bytes]:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _end(process)
        return _start(self._limits)

    def _give_back(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(process)
                return
        _end(process)


def _start(limits: Limits) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "headrace.text.render_process", json.dumps(limits)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": path, "LC_ALL": "C.UTF-8", "TZ": _time_zone()},
    )


def _time_zone() -> str:
    """The server's time zone, as the variable ``TZ`` of POSIX writes it."""
    now = time.localtime()
    west = abs(now.tm_gmtoff) // 60
    return f"<{now.tm_zone}>{'-' if now.tm_gmtoff > 0 else '+'}{west // 60:02}:{west % 60:02}"


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> tuple[dict[str, Any], str]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        head = process.stdout.readline()
        answer: dict[str, Any] = json.loads(head) if head.endswith(b"\n") else {"bytes": -1}
        text = process.stdout.read(answer["bytes"])
    except BrokenPipeError:
        answer, text = {"bytes": -1}, b""
    if len(text) != answer["bytes"]:
        process.kill()
        return {"stopped": _why(process.wait()).name}, ""
    return answer, text.decode()


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


PROCESSES = RenderProcesses()
"""Those of this process; they keep nothing of a template but its compiled form."""

atexit.register(PROCESSES.close)

"""CPU time of this process by kind of thread, from ``/proc``; Linux only.

```
 engine      the thread of the engine's loop      event_loop  the main thread: HTTP, text, metrics
 workers     other threads of Python              native      threads of libraries, such as those of kernels
```
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

TASKS = Path("/proc/self/task")
ENGINE = "headrace-engine"
KINDS = ("engine", "event_loop", "workers", "native")

_USER, _SYSTEM = 11, 12  # fields after the name, which may contain spaces


class ThreadTimes:
    """CPU seconds by kind of thread. Ended threads count with their last reading."""

    def __init__(self, tasks: Path = TASKS) -> None:
        self._tasks = tasks
        self._seen: dict[int, tuple[str, float]] = {}
        self._ended = dict.fromkeys(KINDS, 0.0)
        self._tick = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

    @property
    def measurable(self) -> bool:
        """Whether this system reports thread times."""
        return self._tasks.is_dir()

    def seconds(self) -> Mapping[str, float]:
        """CPU seconds by kind of thread, since the process began."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        seen: dict[int, tuple[str, float]] = {}
        for task in self._tasks.iterdir():
            thread = int(task.name)
            if (used := self._used(task)) is not None:
                seen[thread] = (_kind(thread, names.get(thread)), used)
        for thread, (kind, used) in self._seen.items():
            if thread not in seen or seen[thread][1] < used:  # thread ids may be reused
                self._ended[kind] += used
        self._seen = seen
        totals = dict(self._ended)
        for kind, used in seen.values():
            totals[kind] += used
        return totals

    def _used(self, task: Path) -> float | None:
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            return None
        return (int(fields[_USER]) + int(fields[_SYSTEM])) / self._tick


def _kind(thread: int, name: str | None) -> str:
    if name is None:
        return "native"
    if name == ENGINE:
        return "engine"
    return "event_loop" if thread == os.getpid() else "workers"

"""The processes of a contender, found by their parents, since an engine may be in a session of its own (``/proc``)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable


def processes(root: int) -> list[int]:
    """``root`` and the living processes that descend from it, each after its parent."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (fields := stat_fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


def end(process: subprocess.Popen[bytes], seconds: float = 10.0) -> None:
    """Ends a process and its descendants: asked first, killed after ``seconds``."""
    pids = processes(process.pid)
    began = {pid: fields[19] for pid in pids if (fields := stat_fields(pid))}
    send(pids, signal.SIGCONT)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    # Orphans have another parent by now. A process that began at another time has only taken the number of one.
    left = [pid for pid in pids if (fields := stat_fields(pid)) and fields[19] == began.get(pid)]
    send(left, signal.SIGKILL)
    process.wait()
    for pid in left:
        while state_of(pid) not in "ZX":
            time.sleep(0.001)


def stat_fields(pid: int) -> list[str]:
    """The fields of a process from its state on; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def state_of(pid: int) -> str:
    """``T``: stopped; ``X``: it has ended."""
    return (stat_fields(pid) or ["X"])[0]


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to each process that has not ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

"""CPU time of other processes while a target ran: a disturbed round must not be used for comparisons.

Threads that wait for each other by spinning lose far more than the share of time taken from them, and engines differ in
this. The times are read from ``/proc``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.processes import stat_fields
from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import Record, Target
from headrace.lab.workload.work import Work

FOREIGN = "foreign CPU percent"
"""Name of the fact: time of the race's processors that neither the target nor the client used, of all they had."""

SERVER = "server CPU seconds"
"""Name of the fact: CPU time of the target's processes in its last run. With one core, it compares targets even while
others disturb, because no thread waits for another by spinning.
"""

STAT = Path("/proc/stat")

LIMIT_PERCENT = 8.0
"""Above this a run counts as disturbed; the kernel's own work for a target lies well below."""


class Watched:
    """A target that reports the CPU time of other processes in its last run; ``pids`` returns its own processes."""

    def __init__(self, target: Target, pids: Callable[[], Sequence[int]] = tuple) -> None:
        self.name = target.name
        self._target = target
        self._pids = pids
        self._foreign = self._server = 0.0

    @property
    def completed(self) -> int:
        return self._target.completed

    def run(self, work: Sequence[Work]) -> list[Record]:
        processors = os.sched_getaffinity(0)  # the target's too, and nobody is disturbed on others
        began, busy, own = time.monotonic(), _busy_seconds(processors), self._own_seconds()
        server = self._server_seconds()
        records = self._target.run(work)
        self._server = self._server_seconds() - server
        foreign = (_busy_seconds(processors) - busy) - (self._own_seconds() - own)
        self._foreign = max(0.0, foreign) / ((time.monotonic() - began) * len(processors))
        return records

    def facts(self) -> dict[str, Any]:
        spent = {SERVER: round(self._server, 2)} if self._pids() else {}
        return {**self._target.facts(), FOREIGN: round(100.0 * self._foreign, 1), **spent}

    def close(self) -> None:
        self._target.close()

    def _own_seconds(self) -> float:
        return self._server_seconds() + _process_seconds(os.getpid())

    def _server_seconds(self) -> float:
        return sum(map(_process_seconds, self._pids()))


def undisturbed(rounds: Sequence[Sequence[Run]]) -> list[Sequence[Run]]:
    """The rounds in which other processes took less than `LIMIT_PERCENT` from every target."""
    return [runs for runs in rounds if all(run.facts.get(FOREIGN, 0.0) < LIMIT_PERCENT for run in runs)]


def _busy_seconds(processors: Collection[int]) -> float:
    """Busy seconds of these processors since boot, including time stolen by the host."""
    wanted = {f"cpu{number}" for number in processors}
    busy = 0
    for line in STAT.read_text(encoding="ascii").splitlines():
        name, *told = line.split()
        if name in wanted:
            user, nice, system, _idle, _io, irq, softirq, steal = map(int, told[:8])
            busy += user + nice + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK")


def _process_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process; 0 after it has ended."""
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0

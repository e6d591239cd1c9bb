from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.peers import quiet
from benchmarks.peers.quiet import FOREIGN, SERVER, Watched, undisturbed
from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import Record, summarize
from headrace.lab.workload.work import Work

SPIN = "print('on', flush=True)\nwhile True: pass"


class Waiting:
    name = "waiting"

    def run(self, work: Sequence[Work]) -> list[Record]:
        time.sleep(0.5)
        return []

    def facts(self) -> dict[str, Any]:
        return {"own": 1}

    def close(self) -> None: ...


@pytest.fixture
def busy():
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_only_cpu_time_of_other_processes_is_reported(busy):
    stranger, own = Watched(Waiting()), Watched(Waiting(), lambda: [busy.pid])
    assert stranger.run([]) == own.run([]) == []
    assert stranger.facts()["own"] == 1
    assert stranger.facts()[FOREIGN] > 0.0
    assert SERVER not in stranger.facts()
    assert own.facts()[SERVER] > 0.0
    # The spinner is counted once in all of the machine's time, and taken out again where it is the target's.
    before = own._own_seconds()
    until = time.monotonic() + 60.0
    while own._own_seconds() <= before:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_only_the_processors_of_the_race_count(tmp_path, monkeypatch):
    """Of four processors two are raced on; in a second one of these works half of it, and both others all of it."""
    stat = tmp_path / "stat"

    class Second:
        name = "second"

        def run(self, work: Sequence[Work]) -> list[Record]:
            stat.write_text(reported(half, 0, second, second))
            return []

        def facts(self) -> dict[str, Any]:
            return {}

        def close(self) -> None: ...

    def reported(*busy: int) -> str:
        lines = [f"cpu{i} {ticks} 0 0 77 0 0 0 0 0 0" for i, ticks in enumerate(busy)]
        return "\n".join([f"cpu  {sum(busy)} 0 0 77 0 0 0 0 0 0", *lines, "intr 5"])

    second = os.sysconf("SC_CLK_TCK")
    half = second // 2
    stat.write_text(reported(0, 0, 0, 0))
    monkeypatch.setattr(quiet, "STAT", stat)
    monkeypatch.setattr(quiet.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(quiet, "_process_seconds", lambda pid: 0.0)
    monkeypatch.setattr(quiet.time, "monotonic", iter([5.0, 6.0]).__next__)
    watched = Watched(Second())
    watched.run([])
    assert watched.facts()[FOREIGN] == 25.0


def test_a_round_is_disturbed_if_one_of_its_runs_was():
    def run(name: str, foreign: float) -> Run:
        return Run(name, [], summarize([]), {FOREIGN: foreign})

    calm = [run("a", 1.0), run("b", 2.0)]
    loud = [run("a", 1.0), run("b", 30.0)]
    assert undisturbed([calm, loud]) == [calm]

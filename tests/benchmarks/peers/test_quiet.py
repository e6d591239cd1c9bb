from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.peers.quiet import FOREIGN, Watched, undisturbed
from headrace.lab.bench.record import Record
from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import summarize
from headrace.lab.workload import Work

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


def test_what_others_take_is_told_and_what_the_target_takes_is_not(busy):
    stranger, own = Watched(Waiting()), Watched(Waiting(), [busy.pid])
    assert stranger.run([]) == own.run([]) == []
    assert stranger.facts()["own"] == 1
    assert stranger.facts()[FOREIGN] > 0.0
    # The spinner is counted once in all of the machine's time, and taken out again where it is the target's.
    before = own._own_seconds()
    time.sleep(0.2)
    assert own._own_seconds() > before


def test_a_round_is_disturbed_if_one_of_its_runs_was():
    def run(name: str, foreign: float) -> Run:
        return Run(name, [], summarize([]), {FOREIGN: foreign})

    quiet = [run("a", 1.0), run("b", 2.0)]
    loud = [run("a", 1.0), run("b", 30.0)]
    assert undisturbed([quiet, loud]) == [quiet]

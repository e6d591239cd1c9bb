from __future__ import annotations

import math

from headrace.core.plan import Row, StepOutput, StepPlan
from headrace.lab.calibration import StepRecorder
from tests.doubles.clock import Clock


class Slow:
    """A runner whose launches take no time and whose collections end at set times."""

    def __init__(self, clock: Clock, ends: list[float]) -> None:
        self.clock, self.ends = clock, ends

    def launch(self, plan: StepPlan, now: float) -> None: ...

    def collect(self) -> StepOutput:
        self.clock.now = self.ends.pop(0)
        return StepOutput(0, ((),))


def plan(tokens: int) -> StepPlan:
    return StepPlan(0, (), (), (Row(0, 0, tokens, (), False),))


def test_steps_are_timed_one_after_the_other():
    clock = Clock(0.0)
    recorder = StepRecorder(Slow(clock, [1.0, 3.0, 9.0]), clock)
    for tokens, begin in ((5, 0.25), (6, 1.5), (7, 8.0)):
        if begin == 8.0:
            recorder.pause()
        clock.now = begin
        recorder.launch(plan(tokens), begin)
        recorder.collect()
    assert [(m.work.tokens, m.seconds) for m in recorder.measured] == [(5, 0.75), (6, 1.5), (7, 1.0)]
    hosts = [m.host_seconds for m in recorder.measured]
    assert math.isnan(hosts[0])
    assert hosts[1] == 0.5
    assert math.isnan(hosts[2])


def test_overlapping_steps_do_not_count_the_wait_for_the_one_before():
    clock = Clock(0.0)
    recorder = StepRecorder(Slow(clock, [2.0, 3.5]), clock)
    recorder.launch(plan(1), 0.0)
    clock.now = 0.5
    recorder.launch(plan(2), 0.5)
    recorder.collect()
    recorder.collect()
    assert [m.seconds for m in recorder.measured] == [2.0, 1.5]

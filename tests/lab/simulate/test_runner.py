from __future__ import annotations

import pytest

from headrace.core.plan import Arrival, Entry, Move, Row, StepPlan, Tier
from headrace.core.request import SamplingParams
from headrace.lab.simulate.runner import EOS, SimulatedRunner
from tests.lab.simulate.scenes import Fixed

DOWN, UP = Move(1, 5, Tier.HOST, Tier.DISK), Move(5, 2, Tier.DISK, Tier.HOST)


def entry(slot: int, request_id: str, tokens: int, prompt: int) -> Entry:
    return Entry(slot, request_id, tuple(range(tokens)), prompt, SamplingParams(), 0, frozenset({EOS}), (0,))


def rows(*slots: int, samples: bool = True) -> tuple[Row, ...]:
    return tuple(Row(slot, 0, 1, (), samples) for slot in slots)


def drawn(runner: SimulatedRunner, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
    runner.launch(plan, 0.0)
    return runner.collect().tokens


def test_an_answer_is_played_token_by_token_and_then_ends():
    runner = SimulatedRunner(Fixed(), {"a": (7, 8, 9), "b": (1,)})
    first = StepPlan(0, (entry(0, "a", 4, 4), entry(1, "b", 4, 4)), (), rows(0, 1))
    assert drawn(runner, first) == ((7,), (EOS,))
    assert drawn(runner, StepPlan(1, (), (), rows(0))) == ((8,),)
    assert drawn(runner, StepPlan(2, (), (), rows(0))) == ((EOS,),)
    assert drawn(runner, StepPlan(3, (), (), rows(0))) == ((EOS,),), "a row launched before its end was known"


def test_rows_that_do_not_sample_draw_nothing():
    runner = SimulatedRunner(Fixed(), {"a": (7, 8, 9)})
    assert drawn(runner, StepPlan(0, (entry(0, "a", 4, 4),), (), rows(0, samples=False))) == ((),)
    assert drawn(runner, StepPlan(1, (), (), rows(0))) == ((7,),)


def test_one_that_comes_back_goes_on_where_it_was():
    runner = SimulatedRunner(Fixed(), {"a": (7, 8, 9)})
    assert drawn(runner, StepPlan(0, (entry(3, "a", 5, 4),), (), rows(3))) == ((8,),)


def test_steps_follow_each_other_and_the_clock_follows_what_was_collected():
    runner = SimulatedRunner(Fixed(1.0, host=0.25), {"a": (7,) * 9})
    runner.launch(StepPlan(0, (entry(0, "a", 4, 4),), (), rows(0)), 10.0)
    assert runner.time == 10.25, "packed"
    runner.launch(StepPlan(1, (), (), rows(0)), 10.25)
    assert [runner.collect().step, runner.time] == [0, 11.25]
    assert [runner.collect().step, runner.time] == [1, 12.25]
    assert runner.busy_seconds == 2.0


def test_the_disk_copies_beside_the_steps():
    runner = SimulatedRunner(Fixed(1.0), {"a": (7,) * 9}, disk_seconds=0.75)
    runner.launch(StepPlan(0, (entry(0, "a", 4, 4),), (DOWN, UP), rows(0)), 0.0)
    assert runner.collect().arrivals == (Arrival(DOWN, True, 0.75),)
    runner.launch(StepPlan(1, (), (), rows(0)), 1.0)
    assert runner.collect().arrivals == (Arrival(UP, True, 0.75),)
    assert runner.time == 2.0


def test_a_step_that_waits_lasts_until_something_has_arrived():
    runner = SimulatedRunner(Fixed(0.0), {}, disk_seconds=0.75)
    runner.launch(StepPlan(0, (), (UP,), (), waits=True), 5.0)
    output = runner.collect()
    assert output.arrivals == (Arrival(UP, True, 0.75),)
    assert runner.time == pytest.approx(5.75)

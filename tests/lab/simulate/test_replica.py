"""One simulated engine, driven as a target of the benchmark."""

import pytest

from headrace.config import CacheOptions, SchedulerOptions
from headrace.lab.plan.roofline import H100, SHAPES, Replica
from headrace.lab.simulate.replica import OneAnswer, simulated_target
from headrace.lab.workload.dataset import fixed_lengths
from headrace.wiring.simulation import make_replica, roofline_machine


def target(concurrency=None, **plans):
    options, cache = SchedulerOptions(**plans), CacheOptions()
    machine = roofline_machine(Replica(SHAPES["llama-3.1-8b"], H100), cache, options, 4096)
    return simulated_target("t", *make_replica(options, cache, machine, OneAnswer()), concurrency)


WORK = fixed_lengths(32, 100, 20)


def test_outputs_have_the_length_of_their_work_and_times_are_virtual():
    records = target().run(WORK)
    assert all(not each.error and each.output_tokens == 20 for each in records)
    assert 0.1 < max(each.finished for each in records) < 2.0
    assert all(len(each.token_seconds) == 20 for each in records)


def test_equal_runs_are_equal():
    one = target()
    assert target().run(WORK) == one.run(WORK)


def test_a_closed_loop_has_so_many_requests_open_and_arrivals_when_they_are_sent():
    records = target(concurrency=4).run(WORK)
    ends = sorted((each.arrived, each.finished) for each in records)
    for arrived, _ in ends:
        assert sum(a <= arrived < f for a, f in ends) <= 4
    assert max(arrived for arrived, _ in ends) > 0.0
    assert max(each.ttft for each in records) < max(each.ttft for each in target(max_num_seqs=4).run(WORK))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_static_batches_that_stay_incomplete_start_after_their_timeout(concurrency):
    records = target(concurrency, scheduling_policy="static", max_num_seqs=8).run(WORK[:6])
    assert all(not each.error for each in records)
    assert min(each.ttft for each in records) >= 0.1

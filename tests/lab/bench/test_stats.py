from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from headrace.lab.bench.stats import Record, fairness, groups, meets, percentile, slo_share, spread, summarize

FAST = Record("fast", 0.0, 2.0, (0.5, 1.0, 2.0), prompt_tokens=10, output_tokens=4, finish_reason="stop")
SLOW = Record("slow", 1.0, 5.0, (4.0, 5.0), prompt_tokens=20, output_tokens=2, finish_reason="length")
LOST = Record("lost", 0.0, 3.0, (0.1,), prompt_tokens=5, output_tokens=1, error="gone")


@pytest.mark.parametrize("percent", [0, 1, 50, 95, 99, 100])
def test_a_percentile_is_numpys(percent: float) -> None:
    values = [random.Random(0).random() for _ in range(37)]
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_nothing_has_no_percentile() -> None:
    assert math.isnan(percentile([], 50))
    assert spread([]).count == 0


def test_a_records_own_figures() -> None:
    assert (FAST.ttft, FAST.e2e, FAST.tpot, FAST.gaps) == (0.5, 2.0, 0.5, [0.5, 1.0])
    assert (SLOW.ttft, SLOW.e2e) == (3.0, 4.0)
    single = Record("one", 0.0, 1.0, (1.0,), output_tokens=1)
    assert (single.tpot, single.gaps) == (None, [])
    assert replace(FAST, ended=3.5).tpot == 1.0


def test_a_summary_counts_only_answers_that_were_delivered() -> None:
    summary = summarize([FAST, SLOW, LOST], {"ttft": 1.0, "tpot": 0.6})
    assert (summary.requests, summary.failed, summary.seconds) == (3, 1, 5.0)
    assert (summary.prompt_tokens, summary.output_tokens) == (30, 6)
    assert summary.output_tokens_per_second == pytest.approx(6 / 5)
    assert summary.total_tokens_per_second == pytest.approx(36 / 5)
    assert summary.requests_per_second == pytest.approx(2 / 5)
    assert summary.ttft.p50 == pytest.approx(1.75)
    assert summary.itl.count == 3
    assert summary.goodput == pytest.approx(1 / 5)


def test_slos() -> None:
    assert meets(FAST, {"ttft": 0.5, "itl": 1.0, "e2e": 2.0})
    assert not meets(FAST, {"itl": 0.9})
    assert not meets(LOST, {})
    assert meets(Record("one", 0.0, 1.0, (1.0,), output_tokens=1), {"tpot": 0.001})


def test_an_answer_without_observed_chunks_meets_no_latency_target() -> None:
    unseen = Record("unseen", 0.0, 1.0, output_tokens=5)
    for name in ("ttft", "tpot", "itl"):
        assert not meets(unseen, {name: 9.0})
    assert meets(unseen, {"e2e": 9.0})
    assert meets(replace(unseen, output_tokens=0), {"ttft": 9.0})


def test_no_records_at_all() -> None:
    summary = summarize([])
    assert (summary.requests, summary.seconds, summary.output_tokens_per_second) == (0, 0.0, 0.0)


def test_a_failed_request_does_not_meet_the_slo() -> None:
    assert slo_share([FAST, SLOW, LOST], {"ttft": 1.0}) == pytest.approx(1 / 3)
    assert summarize([FAST, SLOW, LOST], {"ttft": 9.0}).slo_share == pytest.approx(2 / 3)


def test_groups_tell_what_each_tenant_got() -> None:
    assert groups([FAST, SLOW], lambda r: r.tenant) == []
    ours, rest = groups([replace(FAST, tenant="b"), SLOW, LOST], lambda r: r.tenant, {"ttft": 1.0})
    assert (ours.name, ours.requests, ours.failed, ours.output_tokens, ours.slo_share) == ("b", 1, 0, 4, 1.0)
    assert (rest.name, rest.requests, rest.failed, rest.output_tokens, rest.slo_share) == (
        "default",
        2,
        1,
        2,
        0.0,
    )
    assert rest.ttft.p50 == 3.0


def turns(order: str, seconds: float = 1.0) -> list[Record]:
    """Requests of equal size that all come at the start and are served one after the other."""
    return [
        Record(
            f"r{i}",
            0.0,
            (i + 1) * seconds,
            (i * seconds + 0.5,),
            prompt_tokens=9,
            output_tokens=1,
            tenant=name,
        )
        for i, name in enumerate(order)
    ]


def test_taking_turns_is_fair_and_first_come_first_served_under_a_flood_is_not() -> None:
    assert fairness(turns("abababab", 0.1)) == pytest.approx(1.0, abs=0.02)
    assert fairness(turns("aaaaaaab")) < 0.7


def test_a_run_of_one_tenant_has_no_index() -> None:
    assert summarize([FAST]).fairness is None
    assert summarize(turns("ab")).fairness is not None

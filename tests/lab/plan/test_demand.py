from __future__ import annotations

import pytest

from headrace.lab.plan.capacity import BadDemand, demand
from headrace.lab.workload.work import Call, Span


def test_a_workload_in_numbers():
    reported = demand([Call(1.0, 100, 10), Call(2.0, 300, 30)])
    assert reported.requests_per_second == 1.0
    assert (reported.prompt_tokens, reported.fresh_tokens, reported.output_tokens) == (200, 200, 20)
    assert reported.context == (10 * 105 + 30 * 315) / 40
    assert reported.longest == 330
    assert (reported.prompt_at(0.5), reported.prompt_at(0.51), reported.prompt_at(1.0)) == (100, 300, 300)
    assert not reported.shares_prefixes


def test_a_system_prompt_is_computed_once_per_tenant():
    calls = [
        Call(float(i + 1), 140, 5, tenant, content=(Span(1, 0, 100), Span(10 + i, 0, 40)))
        for i, tenant in enumerate(["a", "a", "a", "b"])
    ]
    assert demand(calls).fresh_tokens == (140 + 40 + 40 + 140) / 4
    assert demand(calls).shares_prefixes


def test_a_later_turn_computes_only_what_was_asked_since():
    turns = [
        Call(1.0, 150, 30, content=(Span(1, 0, 100), Span(2, 0, 50)), answer=Span(2, 50, 30)),
        Call(2.0, 190, 30, content=(Span(1, 0, 100), Span(2, 0, 90)), answer=Span(2, 90, 30)),
    ]
    assert demand(turns).fresh_tokens == (150 + 10) / 2


def test_what_follows_a_difference_is_fresh_though_it_was_seen_elsewhere():
    first, second = Span(1, 0, 100), Span(2, 0, 100)
    calls = [Call(1.0, 200, 5, content=(first, second)), Call(2.0, 200, 5, content=(Span(3, 0, 100), second))]
    assert demand(calls).fresh_tokens == 200


@pytest.mark.parametrize(("calls", "message"), [([], "empty"), ([Call(0.0, 2, 4)], "needs a request rate")])
def test_what_cannot_be_planned_for_is_refused(calls, message):
    with pytest.raises(BadDemand, match=message):
        demand(calls)

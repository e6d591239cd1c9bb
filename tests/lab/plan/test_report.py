"""Prices per token at a utilization, and the break-even with an API, by hand."""

import dataclasses

import pytest

from headrace.lab.plan.capacity import Demand
from headrace.lab.plan.report import ApiPrice, Batching, Prices, slots_at_full_load

DEMAND = Demand(10.0, 500.0, 500.0, 100.0, 550.0, 700, (500,))
"""18 million prompt and 3.6 million output tokens per hour."""

CONTINUOUS, STATIC = Batching("continuous", 1000.0, 10.0), Batching("static", 250.0, 2.5)
PRICES = Prices(DEMAND, 0.5, "1 x H100-SXM", 64, 64, 3.6, 7.2, (CONTINUOUS, STATIC), ApiPrice(0.2, 1.0))


def test_a_token_costs_the_device_over_the_tokens_that_it_generates():
    assert CONTINUOUS.dollars_per_million(3.6, 1.0) == pytest.approx(1.0)
    assert CONTINUOUS.dollars_per_million(3.6, 0.25) == pytest.approx(4.0), "idle time is paid for"
    assert STATIC.dollars_per_million(3.6, 1.0) == pytest.approx(4.0)


def test_an_api_charges_for_prompts_and_outputs():
    assert ApiPrice(0.2, 1.0).dollars_per_hour(DEMAND) == pytest.approx(18 * 0.2 + 3.6 * 1.0)
    assert ApiPrice(0.0, 1.0).dollars_per_hour(DEMAND) == pytest.approx(3.6)


def test_at_the_break_even_both_cost_the_same():
    api = PRICES.api.dollars_per_hour(DEMAND)
    even = dataclasses.replace(PRICES, fleet_dollars=0.4 * api).break_even
    assert even == pytest.approx(0.4)
    assert even * api == pytest.approx(0.4 * api)
    assert dataclasses.replace(PRICES, api=None).break_even is None


def test_the_document_has_what_the_lines_say():
    document = PRICES.document()
    assert document["dollars_per_million_output_tokens"] == pytest.approx(7.2 / (0.5 * 3.6))
    assert [each["dollars_per_million_output_tokens"] for each in document["batching"]] == pytest.approx(
        [2.0, 8.0]
    )
    assert document["api"]["break_even_utilization"] == pytest.approx(1.0)
    assert document["api"]["break_even_requests_per_second"] == pytest.approx(10.0)
    assert document["api"]["dollars_per_hour"] == pytest.approx(3.6)
    assert "at 100.0 % utilization, 10 requests/s" in PRICES.lines()[-1]


def test_an_api_that_is_always_cheaper_is_said():
    assert (
        "break-even  none: even at full utilization the API is cheaper, by a factor of 2.00"
        in dataclasses.replace(PRICES, fleet_dollars=14.4).lines()[-1]
    )


def test_a_run_too_short_for_all_slots_has_fewer_and_says_so():
    assert slots_at_full_load(64, 100) == 25
    assert slots_at_full_load(64, 1000) == 64
    assert slots_at_full_load(64, 1) == 1
    assert "25 of 64 slots were used" in dataclasses.replace(PRICES, slots=25).lines()[0]
    assert not any("slots" in line for line in PRICES.lines())

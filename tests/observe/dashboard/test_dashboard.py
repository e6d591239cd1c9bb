"""Snapshots of a server whose events are written by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.events import Arrived, Layer, Spared, TurnedAway
from headrace.core.request import RejectReason
from headrace.core.sleep import SleepState
from headrace.observe.cost.prices import Pricing, TokenPrices
from headrace.observe.dashboard import MOST_ROWS, MOST_TENANTS, PARTS, Kind, Signs, bottleneck
from tests.observe.dashboard.stories import Story, by_name


def test_the_first_snapshot_has_no_rates_and_is_plain_json() -> None:
    story = Story()
    for part in ("", *PARTS):
        shown = story.snapshot(0.0, part)
        assert json.loads(json.dumps(shown)) == shown or part == "requests"  # its columns are a tuple
    assert (shown["time"], shown["now"]) == (1000.0, 0.0)
    assert shown["overview"]["rates"] is None
    assert shown["overview"]["bottleneck"] is None
    assert shown["overview"]["latency"] == {"requests": 0, "ttft": None, "tpot": None, "e2e": None}


def test_rates_latency_and_batches_are_those_of_the_window() -> None:
    story = Story()
    story.snapshot(0.0)
    story.answer("a", 0.0)
    overview = story.snapshot(3.0)["overview"]
    assert overview["rates"] == {
        "requests": pytest.approx(1 / 3),
        "prompt_tokens": pytest.approx(8 / 3),
        "cached_tokens": 0.0,
        "output_tokens": 1.0,
        "steps": 1.0,
    }
    assert overview["latency"] == {
        "requests": 1,
        "ttft": [1.0, 1.0, 1.0],
        "tpot": [1.0, 1.0, 1.0],
        "e2e": [3.0, 3.0, 3.0],
    }
    assert overview["batch"]["counts"][:2] == [3, 0]
    assert overview["kv"] == {"usage": 0.05, "waste": 0.25, "blocks": 100}
    assert overview["shares"] == {"computing": 1.0, "idle": 0.0, "overhead": 0.0}
    assert overview["bottleneck"]["kind"] == "bandwidth"
    assert overview["model"] == {"num_parameters": 110, "active_parameters": 110}
    (only,) = overview["classes"]
    assert (only["name"], only["goodput"], only["met"], only["missed"]) == ("default", None, 0, 0), (
        "no targets"
    )


def test_what_is_older_than_the_window_does_not_count() -> None:
    story = Story()
    story.snapshot(0.0)
    story.answer("a", 0.0)
    for now in (3.0, 5.0, 7.0, 9.0):
        overview = story.snapshot(now)["overview"]
    assert overview["rates"]["output_tokens"] == 0.0
    assert overview["bottleneck"]["kind"] == "idle"
    assert overview["latency"]["requests"] == 1
    assert story.snapshot(70.0)["overview"]["latency"]["requests"] == 0


def test_after_a_pause_without_listeners_rates_begin_anew() -> None:
    story = Story()
    story.snapshot(0.0)
    story.answer("a", 0.0)
    assert story.snapshot(100.0)["overview"]["rates"] is None
    assert story.snapshot(101.0)["overview"]["rates"]["output_tokens"] == 0.0


def test_a_busy_event_loop_is_the_bottleneck() -> None:
    story = Story()
    story.snapshot(0.0)
    story.answer("a", 0.0)
    story.loop = 2.9
    assert story.snapshot(3.0)["overview"]["bottleneck"]["kind"] == "front_end"


def test_the_cost_of_a_million_tokens_includes_idle_time() -> None:
    story = Story(Pricing(0.5, currency="EUR"))
    story.snapshot(0.0)
    story.answer("a", 0.0)
    assert story.snapshot(2.0)["overview"]["cost"]["per_million_tokens"] == pytest.approx(1e6 * 0.5 * 2 / 11)
    cost = story.snapshot(4.0)["overview"]["cost"]
    assert cost["per_million_tokens"] == pytest.approx(1e6 * 0.5 * 4 / 11)  # 8 prompt and 3 output tokens
    assert (cost["per_hour"], cost["currency"]) == (1800.0, "EUR")
    assert cost["total"] == pytest.approx(1.5)
    assert Story().snapshot(0.0)["overview"]["cost"] is None
    by_token = Story(Pricing(tokens=TokenPrices(1.0, 0.0, 2.0))).snapshot(0.0)["overview"]["cost"]
    assert (by_token["per_million_tokens"], by_token["per_hour"]) == (None, None)


def test_requests_are_listed_newest_first_with_the_open_ones_on_top() -> None:
    story = Story()
    story.answer("a", 0.0, cached=4)
    story.answer("b", 4.0, tenant="globex")
    story.tell(8.0, Arrived("c", 5, "acme", 0, 8.0))
    part = story.snapshot(9.0, "requests")["requests"]
    rows = [dict(zip(part["columns"], row, strict=True)) for row in part["rows"]]
    assert [row["id"] for row in rows] == ["c", "b", "a"]
    assert [row["state"] for row in rows] == ["waiting", "finished", "finished"]
    assert rows[0]["age_seconds"] == 1.0
    assert rows[0]["ttft_seconds"] is None
    assert rows[2] | {"id": ""} == {
        "id": "",
        "state": "finished",
        "why": "length",
        "tenant": "acme",
        "service_class": "default",
        "prompt_tokens": 8,
        "cached_tokens": 4,
        "output_tokens": 3,
        "age_seconds": 3.0,
        "ttft_seconds": 1.0,
        "preemptions": 0,
    }
    assert [row[0] for row in story.snapshot(9.0, "requests", "globex")["requests"]["rows"]] == ["b"]
    story.tell(9.0, Spared("d", "acme", Layer.EXACT, 8, 3, 1.0))
    row = story.snapshot(9.0, "requests")["requests"]["rows"][1]
    assert row[:4] == ["d", "finished", "exact cache", "acme"]


def test_the_list_of_requests_is_bounded_and_says_so() -> None:
    story = Story()
    story.tell(0.0, *(Arrived(f"r{number}", 1, "acme", 0, 0.0) for number in range(MOST_ROWS + 7)))
    part = story.snapshot(1.0, "requests")["requests"]
    assert (len(part["rows"]), part["more"]) == (MOST_ROWS, 7)


def test_tenants_have_share_cost_and_quota() -> None:
    story = Story(Pricing(0.5))
    story.answer("a", 0.0)
    story.answer("b", 3.0, tenant="globex", tokens=1)
    story.tell(6.0, TurnedAway("c", "globex", "default", RejectReason.QUEUE_FULL))
    story.answer("d", 6.0, tokens=1)
    part = story.snapshot(8.0, "tenants")["tenants"]
    rows = by_name(part["tenants"])
    assert list(rows) == ["acme", "globex"]
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)
    assert rows["acme"]["share"] > rows["globex"]["share"] > 0.0
    assert (rows["acme"]["weight"], rows["acme"]["requests"], rows["acme"]["tokens"]) == (2.0, 2, 20)
    assert rows["acme"]["cost"] == pytest.approx(0.5 * rows["acme"]["device_seconds"])
    assert rows["acme"]["limits"]["tokens_per_day"]["remaining"] == 4.0
    assert rows["globex"]["refused"] == 1
    assert 0.0 < part["jain"] <= 1.0


def test_the_table_of_tenants_is_bounded_and_says_so() -> None:
    story = Story()
    story.tell(0.0, *(Arrived(f"r{at}", 1, f"tenant {at}", 0, 0.0) for at in range(MOST_TENANTS + 3)))
    part = story.snapshot(1.0, "tenants")["tenants"]
    assert (len(part["tenants"]), part["more"]) == (MOST_TENANTS, 3)


def test_a_tenant_sees_its_own_figures_and_nothing_of_others() -> None:
    story = Story(Pricing(0.5, currency="EUR"))
    story.snapshot(0.0, "", "acme")
    story.answer("a", 0.0)
    story.snapshot(2.0, "", "acme")
    story.answer("b", 3.0, tenant="globex", tokens=1)
    story.tell(4.0, Spared("s", "globex", Layer.EXACT, 8, 3, 1.0))
    shown = story.snapshot(4.0, "tenants", "acme")
    overview = shown["overview"]
    assert overview["tenant"] == "acme"
    assert overview["rates"]["output_tokens"] == pytest.approx(3 / 4)
    assert overview["latency"]["requests"] == 1
    assert overview["caches"] == {}
    assert overview["cost"]["total"] == pytest.approx(1.5)
    assert all(overview[name] is None for name in ("slots", "batch", "kv", "shares", "classes", "bottleneck"))
    assert [row["name"] for row in shown["tenants"]["tenants"]] == ["acme"]
    assert shown["tenants"]["jain"] is None
    assert "globex" not in json.dumps([shown, story.snapshot(4.0, "requests", "acme")])
    assert story.snapshot(4.0, "caches", "globex")["caches"]["layers"]["exact"]["hits"] == 1


def test_an_unknown_part_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        Story().snapshot(0.0, "steps")


BUSY = Signs(
    running=8,
    waiting=0,
    slots=64,
    kv=0.3,
    computing=0.9,
    idle=0.0,
    gap=0.1,
    loop=0.2,
    blocked=0,
    preempted=0,
    prefill=0.1,
)
"""Decoding steps follow one another, and nothing waits."""


@pytest.mark.parametrize(
    ("changed", "kind", "named"),
    [
        ({}, Kind.BANDWIDTH, "90 % of the step time is spent on decoding, which reads all weights"),
        ({"sparse": True}, Kind.BANDWIDTH, "which reads the weights of the experts that are chosen"),
        (
            {"sleep": SleepState.WEIGHTS_OFFLOADED, "waiting": 1},
            Kind.IDLE,
            "the memory of its KV cache is freed",
        ),
        ({"sleep": SleepState.DISCARD_ALL}, Kind.IDLE, "the memory of its KV cache and weights is freed"),
        ({"prefill": 0.7}, Kind.ARITHMETIC, "70 % of the step time is spent on prompt tokens"),
        ({"mfu": 0.2, "mbu": 0.6}, Kind.BANDWIDTH, "20 % of peak arithmetic and 60 % of peak bandwidth"),
        ({"mfu": 0.6, "mbu": 0.2, "prefill": 0.0}, Kind.ARITHMETIC, "60 % of peak arithmetic"),
        ({"mbu": 0.2, "prefill": 0.7}, Kind.ARITHMETIC, "prompt tokens"),
        (
            {"running": 64, "waiting": 12},
            Kind.SLOTS,
            "All 64 slots are in use and 12 requests wait; steps compute 90 % of the time.",
        ),
        (
            {"running": 1, "slots": 1, "waiting": 1},
            Kind.SLOTS,
            "All 1 slot is in use and 1 request waits; steps compute 90 % of the time.",
        ),
        (
            {"waiting": 3, "kv": 0.97},
            Kind.MEMORY,
            "97 % of the KV blocks are held and 3 requests wait for blocks.",
        ),
        (
            {"waiting": 1, "kv": 0.6, "blocked": 1},
            Kind.MEMORY,
            "60 % of the KV blocks are held and 1 request waits",
        ),
        ({"preempted": 2, "kv": 0.9}, Kind.MEMORY, "2 requests had to give up blocks"),
        ({"idle": 0.8, "computing": 0.1}, Kind.IDLE, "No request was open for 80 %"),
        ({"loop": 0.9}, Kind.FRONT_END, "uses 90 % of a core"),
        ({"gap": 0.5, "computing": 0.5}, Kind.FRONT_END, "no step computed for 50 % of the time"),
    ],
)
def test_signs_name_the_bottleneck(changed: dict[str, float], kind: Kind, named: str) -> None:
    found = bottleneck(BUSY._replace(**changed))
    assert found.kind is kind
    assert named in found.sentence


def test_preemptions_for_fairness_are_not_a_lack_of_memory() -> None:
    assert bottleneck(BUSY._replace(preempted=3, kv=0.2)).kind is Kind.BANDWIDTH


def test_requests_that_wait_for_the_step_are_not_a_lack_of_slots() -> None:
    assert bottleneck(BUSY._replace(waiting=5)).kind is Kind.BANDWIDTH


def test_a_full_queue_outweighs_a_short_rest() -> None:
    assert bottleneck(BUSY._replace(waiting=5, running=64, idle=0.6)).kind is Kind.SLOTS


shares = st.floats(0.0, 1.0)
counts = st.integers(0, 1000)
signs = st.builds(
    Signs,
    *(counts, counts, st.integers(1, 1000), shares, shares, shares, shares, st.floats(0.0, 2.0)),
    *(counts, counts, shares, st.none() | shares, st.none() | shares),
)


@given(signs)
def test_there_is_always_one_sentence(each: Signs) -> None:
    found = bottleneck(each)
    assert found.sentence.endswith(".")
    assert found.sentence.count(". ") == 0


def test_an_explanation_has_the_operations_of_the_weights_of_a_token() -> None:
    story = Story()
    story.answer("a", 0.0, tokens=3)
    explained = story.folds.explain("a", 9.0)
    assert explained is not None
    # 8 tokens of the prompt and 2 of the answer with 100 weights, and 3 times the 10 of the head
    assert explained["cost"]["estimated_flops"] == 2 * (10 * 100 + 3 * 10)

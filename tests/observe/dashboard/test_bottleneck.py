"""Each bottleneck is recognized by its signs, and the sentence names the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.dashboard.bottleneck import Kind, Signs, bottleneck

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
        ({}, Kind.BANDWIDTH, "90 % of the step time is spent on decoding"),
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

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from headrace.lab.bench.latency import (
    Machine,
    Part,
    Step,
    bound,
    document,
    machine_table,
    middle,
    prompt_keys,
    step_table,
)

MACHINE = Machine({1: 20e9, 2: 40e9}, {"bfloat16": {"own": 0.9e12, "oneDNN": 1e12}, "int8": {"own": 2e12}})


def test_a_part_needs_the_longer_of_reading_and_multiplying():
    reads = bound(Part("linear", 0.05, bytes=1e9, operations={"bfloat16": 1e9}), MACHINE)
    assert (reads.bandwidth, reads.arithmetic) == pytest.approx((0.025, 0.001))
    assert reads.allowed == reads.bandwidth
    assert reads.share == pytest.approx(0.5)
    multiplies = bound(Part("linear", 0.011, bytes=1e8, operations={"int8": 2e10}), MACHINE)
    assert multiplies.allowed == pytest.approx(0.01)
    assert multiplies.held_by == "arithmetic"


def test_of_two_types_of_numbers_the_quicker_counts():
    def arithmetic(planes: float) -> float:
        operations = {"int8": planes * 1e9, "bfloat16": 1e9}
        return bound(Part("linear", 1.0, operations=operations), MACHINE).arithmetic

    assert arithmetic(1) == pytest.approx(1e9 / 2e12)
    assert arithmetic(3) == pytest.approx(1e9 / 1e12)


@pytest.mark.parametrize("window", [None, 1000, 100, 40, 1])
def test_a_window_bounds_what_a_prompt_looks_at(window):
    keys = [min(position, window or position) for position in range(1, 101)]
    assert prompt_keys(100, window) == sum(keys)


def test_what_exceeds_the_bound_is_overhead():
    assert bound(Part("linear", 0.06, bytes=1e9), MACHINE).held_by == "overhead"
    assert bound(Part("linear", 0.04, bytes=1e9), MACHINE).held_by == "bandwidth"
    quicker = bound(Part("linear", 0.02, bytes=1e9), MACHINE)
    assert quicker.overhead == 0
    assert bound(Part("sampling", 0.001), MACHINE).held_by == "overhead"


def step() -> Step:
    parts = (
        Part("linear layers", 0.030, 1e9, {"bfloat16": 1e9}),
        Part("attention", 0.020, 1e6, {"bfloat16": 1e10}),
        Part("sampling", 0.010),
    )
    return Step("decode", 4, 128, 16, 0.05, tuple(bound(part, MACHINE) for part in parts), MACHINE.bandwidth)


def test_a_steps_bounds_are_added():
    whole = step()
    assert whole.allowed == pytest.approx(0.025 + 0.01)
    assert whole.share == pytest.approx(0.035 / 0.05)
    assert Step("decode", 4, 128, 16, 0.05, whole.parts[:2], 1.0).held_by == "bandwidth"
    assert Step("decode", 4, 128, 16, 0.03, whole.parts[1:], 1.0).held_by == "overhead"


def test_tables_and_document_say_the_same():
    console = Console(record=True, width=120)
    console.print(machine_table(MACHINE))
    console.print(step_table(step()))
    text = console.export_text()
    for expected in (
        "memory read by 2 threads",
        "40.0 GB/s",
        "1.00 T/s",
        "batch 4, context 128",
        "50.00",
        "70%",
    ):
        assert expected in text
    reported = json.loads(json.dumps(document(MACHINE, [step()])))
    assert reported["machine_read_bytes_per_second"] == {"1": 20e9, "2": 40e9}
    (only,) = reported["steps"]
    assert only["allowed_seconds"] == pytest.approx(0.035)
    assert [part["held_by"] for part in only["parts"]] == ["bandwidth", "arithmetic", "overhead"]


def test_of_several_rounds_the_one_of_the_median_share_is_shown():
    rounds = [replace(step(), seconds=seconds) for seconds in (0.05, 0.07, 0.04, 0.1)]
    shown = middle(rounds)
    assert shown == replace(rounds[1], shares=tuple(each.share for each in rounds))
    assert middle(rounds[:3]).seconds == 0.05
    console = Console(record=True, width=200)
    console.print(step_table(middle(rounds)))
    assert "4 rounds reached 35% to 88%" in console.export_text()
    assert document(MACHINE, [shown])["steps"][0]["shares"] == list(shown.shares)

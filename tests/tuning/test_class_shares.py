"""Weights and floors of classes that move while targets are missed: within bounds, one class at a time, and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace.cli import app
from headrace.core.request import Slo
from headrace.core.tenancy.tenants import CLASSES, DEFAULT, FLEX, PRIORITY, ClassShare, ServiceClass
from headrace.tuning.class_shares import CALM, LEAST_REQUESTS, LiveShares, Shares

TARGETS = Slo(1.0)
FIRST = replace(PRIORITY, slo=TARGETS, most=ClassShare(32.0, 0.2))
SECOND = replace(DEFAULT, slo=TARGETS, most=ClassShare(8.0, DEFAULT.floor))


class Counts:
    """Requests of classes that met and missed their targets, as they end."""

    def __init__(self) -> None:
        self.now: dict[str, tuple[int, int]] = {}

    def end(self, name: str, met: int, missed: int) -> dict[str, tuple[int, int]]:
        before = self.now.get(name, (0, 0))
        self.now[name] = before[0] + met, before[1] + missed
        return dict(self.now)


def test_a_class_that_misses_is_raised_to_its_bounds_and_comes_back() -> None:
    shares, counts = Shares([FIRST, DEFAULT, FLEX]), Counts()
    raised = [list(shares.decide(counts.end("priority", 0, 20))) for _ in range(6)]
    assert [move.share for moves in raised for move in moves[:1]] == [
        ClassShare(16.0, 0.10),
        ClassShare(32.0, 0.10),
        ClassShare(32.0, 0.15),
        ClassShare(32.0, 0.2),
        ClassShare(32.0, 0.2),
    ], "the last one only says that there is no higher share, once"
    assert raised[0][0].why == "0% of its requests met their targets"
    assert raised[4][0].why.endswith("at the highest share")
    assert not raised[5]
    lowered = [list(shares.decide(counts.end("priority", 20, 0))) for _ in range(4 * CALM + 3)]
    assert [len(each) for each in lowered] == [*([0, 0, 1] * 4), 0, 0, 0]
    assert shares.present == {"priority": ClassShare(8.0, 0.10)}


def test_a_judgement_needs_requests() -> None:
    shares, counts = Shares([FIRST]), Counts()
    for _ in range(LEAST_REQUESTS - 1):
        assert not list(shares.decide(counts.end("priority", 0, 1)))
    assert list(shares.decide(counts.end("priority", 0, 1)))
    assert not list(shares.decide(dict(counts.now))), "the same requests are not judged twice"


def test_only_the_most_important_class_that_misses_is_raised() -> None:
    shares, counts = Shares([SECOND, FIRST]), Counts()
    counts.end("default", 0, 40)
    (move,) = shares.decide(counts.end("priority", 0, 40))
    assert move.name == "priority"
    counts.end("default", 0, 40)
    (move,) = shares.decide(counts.end("priority", 40, 0))
    assert move.name == "default"


def test_classes_without_bounds_never_move() -> None:
    assert not Shares(CLASSES).any
    assert not list(Shares(CLASSES).decide({"priority": (0, 100)}))


@given(
    st.lists(
        st.tuples(st.sampled_from(["priority", "default"]), st.integers(0, 50), st.integers(0, 50)),
        max_size=60,
    )
)
def test_shares_stay_between_those_of_the_file_and_the_bounds(ends: list[tuple[str, int, int]]) -> None:
    shares, counts = Shares([FIRST, SECOND, FLEX]), Counts()
    given_terms: dict[str, ServiceClass] = {"priority": FIRST, "default": SECOND}
    for end in ends:
        list(shares.decide(counts.end(*end)))
        for name, share in shares.present.items():
            terms = given_terms[name]
            assert terms.most is not None
            assert terms.weight <= share.weight <= terms.most.weight
            assert terms.floor <= share.floor <= terms.most.floor


class Service:
    async def between_steps(self, function: Callable[[], Any]) -> Any:
        return function()


@pytest.mark.parametrize("broken", [False, True])
def test_a_change_reaches_the_engine_and_the_log(broken: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.class_shares")
    changed, told = list[dict[str, ClassShare]](), dict[str, ClassShare]()

    def change(shares: Any) -> None:
        if broken:
            raise RuntimeError("the engine has ended")
        changed.append(shares)

    live = LiveShares(
        Shares([FIRST, SECOND]),
        Service(),  # type: ignore[arg-type]
        lambda: {"priority": (10, 10)},
        change,
        frozen=lambda: False,
        changed=told.__setitem__,
    )
    assert told == {"priority": ClassShare(8.0, 0.1), "default": ClassShare(4.0, 0.1)}
    asyncio.run(live.look())
    if broken:
        assert "shares of classes cannot be changed" in caplog.text
        assert told["priority"].weight == 8.0
    else:
        # All shares go together: an engine that is started again gets the last message only.
        assert changed == [{"priority": ClassShare(16.0, 0.1), "default": ClassShare(4.0, 0.1)}]
        assert told["priority"].weight == 16.0
        assert (
            "class priority has weight 16, floor 10 %: 50% of its requests met their targets" in caplog.text
        )


def met(folder: Path, terms: str) -> dict[str, float]:
    """The share of requests within 2 s to the first token, by class, in a simulation."""
    file = folder / "tenants.yaml"
    file.write_text(f"classes: {{priority: {{weight: 1, ttft_seconds: 2.0, {terms}}}}}\n")
    words = ["simulate", "llama-3.1-8b", "--tenants", str(file), "--requests", "400", "--max-num-seqs", "64"]
    words += ["--slo-ttft", "2"]
    for name, rate in (("priority", 2), ("default", 4)):
        words += ["--workload", f"tenant={name},class={name},rate={rate},prompt=uniform:4000:8000,answer=50"]
    result = CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "160"})
    rows = [line.split("│") for line in result.output.splitlines() if line.startswith("│")]
    return {
        row[1].strip(): float(row[-2].strip(" %"))
        for row in rows
        if row[1].strip() in ("priority", "default")
    }


@pytest.mark.slow
def test_a_class_that_is_starved_by_its_weight_meets_its_targets_when_it_moves(tmp_path: Path) -> None:
    fixed, moving = met(tmp_path, ""), met(tmp_path, "max_weight: 16")
    assert fixed["priority"] < 60.0
    assert moving["priority"] > fixed["priority"] + 20.0
    assert moving["default"] > 60.0

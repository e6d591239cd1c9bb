"""Two ways, one answer: what grammars force is drafted, or drawn step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.compute.grammar import matchers as module
from headrace.core.drafting.forced import SOURCE
from headrace.core.events import Preempted, Verified
from headrace.core.request import Request, SamplingParams
from tests.parity.drafted_runs import END, Run, check_same, liar, random_requests, serve
from tests.parity.test_drafts import WAYS

SHAPE = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FIXED: list[dict[str, Any]] = [
    {"regex": "name=[a-z]{2,4}; size=(large|largest)!"},
    {"json": SHAPE, "whitespace_pattern": ""},
    {"choice": ["yes, of course", "yes, and no"]},
]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that the worker is too late for has no drafts."""
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 5.0)


def fixed_requests(count: int) -> list[Request]:
    """Requests whose answers have a fixed shape, with any sampling."""
    return [
        Request(
            f"r{number}",
            tuple(range(20, 33 + number % 5)),
            SamplingParams(
                temperature=(0.0, 1.0, 1.5)[number % 3],
                max_tokens=40 + number % 3,
                logprobs=2 if number % 4 == 0 else None,
                presence_penalty=0.5 if number % 5 == 0 else 0.0,
                structured_outputs=FIXED[number // 3 % len(FIXED)],
            ),
            seed=number,
            eos_token_ids=frozenset({END}),
        )
        for number in range(count)
    ]


def verified(run: Run) -> list[Verified]:
    return [event for event in run.events if isinstance(event, Verified) and event.source == SOURCE]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_forced_drafts_change_no_answer_and_are_all_accepted(way):
    todo = fixed_requests(36)
    plain, forced = serve(todo, **way), serve(todo, forced=True, **way)
    check_same(plain, forced)
    reported = verified(forced)
    assert sum(event.drafted for event in reported) > 50
    assert all(event.accepted == event.drafted for event in reported)
    assert bool([event for event in forced.events if isinstance(event, Preempted)]) == ("blocks" in way)


def test_random_requests_say_the_same_beside_a_drafter_that_lies():
    todo = random_requests(3, 60) + fixed_requests(6)
    todo = [each if number < 60 else replace(each, id=f"f{number}") for number, each in enumerate(todo)]
    plain = serve(todo)
    forced = serve(todo, liar(plain, 3), forced=True, overlap=1)
    check_same(plain, forced)
    assert verified(forced)
    assert {event.source for event in forced.events if isinstance(event, Verified)} > {SOURCE}

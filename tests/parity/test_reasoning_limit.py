"""Two ways, one answer, for answers whose reasoning has a limit."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from headrace import SamplingParams
from headrace.core.constraint import ANY_TEXT, ReasoningLimit, as_constraint
from tests.parity.test_structured import STORY, answers, crowded, make

LIMIT = ReasoningLimit(9, ("<think>",), ("</think>",), opened=True)
NUMBER = replace(as_constraint({"regex": "[0-9]{3}"}), after="</think>")
PARAMS = [
    SamplingParams(
        max_tokens=48 + number,
        temperature=(0.0, 0.9)[number % 2],
        seed=number,
        ignore_eos=number % 3 > 0,
        structured_outputs=replace(
            (ANY_TEXT, NUMBER)[number % 3 == 0], reasoning=replace(LIMIT, tokens=3 * number)
        ),
    )
    for number in range(10)
]
PROMPTS = [STORY + f"Number {number}: <think>" for number in range(len(PARAMS))]


@functools.cache
def alone() -> list[tuple]:
    """One after the other, with nothing shared."""
    return answers(make(max_num_seqs=1, enable_prefix_caching=False, overlap=0), PROMPTS, PARAMS)


def test_the_reasoning_ends_in_time_and_the_answer_goes_on():
    for number, (_, text, reason, _) in enumerate(alone()):
        thought, marker, said = text.partition("</think>")
        assert marker, text
        assert thought or not number
        if number % 3 == 0:
            assert (len(said), said.isdigit(), reason) == (3, True, "stop")
        else:
            assert said


@pytest.mark.parametrize(
    "options", [{}, {"overlap": 1}, {"overlap": 1, "max_num_batched_tokens": 16}], ids=str
)
def test_batching_overlap_and_chunks_change_nothing(options):
    assert answers(make(**options), PROMPTS, PARAMS) == alone()


def test_a_preempted_answer_is_the_undisturbed_one():
    llm, preempted = crowded(overlap=1)
    assert answers(llm, PROMPTS, PARAMS) == alone()
    assert preempted

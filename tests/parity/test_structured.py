"""Two ways, one answer, for structured output: overlap, preemption, shared prefixes, chunks, neighbours.

The built-in model in single precision under torch's kernels, so that a batch's size moves no near-tie.
"""

from __future__ import annotations

import functools
import json

import jsonschema
import pytest

from headrace import LLM, SamplingParams
from headrace.core.events import Preempted
from tests.doubles.scores import Score

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "friends": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    {"json": PERSON},
    {"regex": r"([a-z]{3,9} ){6,12}\."},
    {"choice": ["yes, of course", "no, never"]},
    {"grammar": 'start: "(" expr ")"\nexpr: /[0-9]{1,3}/ (/[+*]/ expr)?'},
    {"json_object": True},
    None,
]
STORY = "Once upon a time there was a little fox who lived in the wood and liked to sing. " * 2
PARAMS = [
    SamplingParams(
        max_tokens=60 + number,
        temperature=(0.0, 0.8, 1.3)[number % 3],
        seed=number,
        logprobs=1 if number % 4 == 0 else None,
        presence_penalty=0.5 if number % 5 == 0 else 0.0,
        structured_outputs=CONSTRAINTS[number % len(CONSTRAINTS)],  # type: ignore[arg-type]
    )
    for number in range(18)
]
PROMPTS = [STORY + f"Number {number}:" for number in range(len(PARAMS))]


def make(**options) -> LLM:
    given = {"kernels": "torch", "dtype": "float32", "max_model_len": 192, "max_num_seqs": 8}
    return LLM("builtin", **(given | options))


def crowded(overlap: int) -> tuple[LLM, list[Preempted]]:
    """An engine with so few blocks that it preempts, and the preemptions as they come."""
    probe = make()
    block = probe.loaded.ledger.block_bytes
    probe.close()
    llm = make(overlap=overlap, kv_cache_memory_bytes=14 * block, scheduling_policy="fcfs")
    preempted: list[Preempted] = []
    step = llm.loaded.engine.step

    def watched(now):
        events = step(now)
        preempted.extend(event for event in events if isinstance(event, Preempted))
        return events

    llm.loaded.engine.step = watched  # type: ignore[method-assign]
    return llm, preempted


def answers(llm: LLM, prompts: list[str] = PROMPTS, params: list[SamplingParams] = PARAMS) -> list[tuple]:
    try:
        outputs = llm.generate(prompts, params, progress=False)
    finally:
        llm.close()
    each = [output.outputs[0] for output in outputs]
    assert not any(answer.error for answer in each)
    return [
        (
            answer.token_ids,
            answer.text,
            answer.finish_reason,
            [Score(each.logprob) for each in answer.logprobs],
        )
        for answer in each
    ]


@functools.cache
def alone() -> list[tuple]:
    """One after the other, with nothing shared."""
    return answers(make(max_num_seqs=1, enable_prefix_caching=False, overlap=0))


def test_every_answer_is_what_was_asked_for_or_its_beginning():
    for params, (_, text, reason, _) in zip(PARAMS, alone(), strict=True):
        wanted = params.structured_outputs
        if wanted is None or reason != "stop":
            continue
        if wanted.kind == "json":
            jsonschema.validate(json.loads(text), json.loads(wanted.source))
        if wanted.kind == "choice":
            assert text in json.loads(wanted.source)
    ended = [reason for _, _, reason, _ in alone()]
    assert ended.count("stop") > 6
    assert "length" in ended


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": 1},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"overlap": 1, "max_num_batched_tokens": 16, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_batching_overlap_sharing_and_chunks_change_nothing(options):
    assert answers(make(**options)) == alone()


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_preempted_answer_is_the_undisturbed_one(overlap):
    llm, preempted = crowded(overlap)
    assert answers(llm) == alone()
    assert len(preempted) >= 2


def test_a_grammar_that_fails_at_run_time_ends_its_own_answer_alone():
    """The bomb passes compilation, and its lexer gives up after some tokens."""
    llm = make()
    bomb = SamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=150,
        logit_bias=dict.fromkeys(llm.tokenizer.eos_token_ids, -100.0),  # type: ignore[arg-type]
        structured_outputs={"regex": "(a{1,5000}){1,5000}"},  # type: ignore[arg-type]
    )
    try:
        outputs = llm.generate([*PROMPTS, "Hi"], [*PARAMS, bomb], progress=False)
    finally:
        llm.close()
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.error.startswith("structured output failed: ")) == ("failed", True)
    assert [output.outputs[0].text for output in outputs[:-1]] == [text for _, text, _, _ in alone()]

"""Requests of Dynamo answered by an engine: tokens, ends, cancellation, drain; without Dynamo."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from headrace.core.constraint import ConstraintKind
from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason, InvalidParameter, SamplingParams
from headrace.fleet.dynamo.answering import RequestFailed, final_chunk, read_request, token_chunk
from headrace.service.service import Refused
from headrace.testing.hashing_runner import expected_tokens
from tests.doubles.services import Leash
from tests.fleet.dynamo.workers import answering, body, collected

FRONTEND = {
    "token_ids": [5, 6, 7],
    "model": "builtin",
    "sampling_options": {
        "n": 1,
        "best_of": None,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 3,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.2,
        "use_beam_search": False,
        "length_penalty": None,
        "include_stop_str_in_output": None,
        "guided_decoding": None,
    },
    "stop_conditions": {
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["\n"],
        "stop_token_ids_hidden": [11, 12, 11],
        "ignore_eos": True,
        "max_thinking_tokens": None,
    },
    "output_options": {"logprobs": 2, "prompt_logprobs": None, "skip_special_tokens": True},
    "eos_token_ids": [2],
    "routing": {"priority": 4},
    "extra_args": {"nvext": {"cache_salt": "acme"}},
}
"""A request as the frontend sends it: with a None for whatever its client did not set."""


def test_a_whole_request_is_read() -> None:
    asked = read_request(FRONTEND)
    assert asked.tokens == (5, 6, 7)
    assert asked.priority == -4, "Dynamo's higher priorities run sooner, our lower ones"
    assert asked.salt == "acme"
    assert asked.end_tokens == {2}
    assert asked.params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=3,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.2,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=(11, 12),
        ignore_eos=True,
        logprobs=2,
    ), "stop strings are the frontend's, which has the text"


def test_what_is_not_given_has_its_default() -> None:
    asked = read_request({"token_ids": [1], "sampling_options": None})
    assert asked == ((1,), SamplingParams(), 0, "", frozenset())


@pytest.mark.parametrize(
    ("guided", "kind"),
    [
        ({"json": {"type": "object"}, "regex": None}, ConstraintKind.JSON),
        ({"regex": "[ab]+"}, ConstraintKind.REGEX),
        ({"choice": ["yes", "no"]}, ConstraintKind.CHOICE),
        ({"json": {"type": "object"}, "whitespace_pattern": "[ ]?"}, ConstraintKind.JSON),
    ],
)
def test_guided_decoding_is_a_constraint(guided: dict[str, object], kind: ConstraintKind) -> None:
    asked = read_request({"token_ids": [1], "sampling_options": {"guided_decoding": guided}})
    constraint = asked.params.structured_outputs
    assert constraint is not None
    assert constraint.kind is kind
    assert constraint.whitespace == guided.get("whitespace_pattern")


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling_options": {"length_penalty": 0.5}}, "length_penalty"),
        ({"sampling_options": {"n": 2}}, "n"),
        ({"sampling_options": {"best_of": 3}}, "best_of"),
        ({"sampling_options": {"top_p": 2.0}}, "top_p"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "max_thinking_tokens"),
        ({"stop_conditions": {"max_tokens": 0}}, "max_tokens"),
        ({"output_options": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"multi_modal_data": {"image": "x"}}, "multi_modal_data"),
        ({"prefill_result": {"a": 1}}, "prefill_result"),
        ({"sampling_options": {"guided_decoding": {"json": {}, "regex": "a"}}}, "structured_outputs"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(more: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidParameter, match=field) as caught:
        read_request({"token_ids": [1], **more})
    assert caught.value.param == field


def test_probabilities_come_with_the_chosen_token_first() -> None:
    chosen = TokenLogprob(7, -1.5, 2, ((3, -0.5), (7, -1.5), (9, -3.0)))
    chunk = token_chunk((7,), (chosen,), str, 2)
    assert chunk["token_ids"] == [7]
    assert chunk["index"] == 0
    assert chunk["log_probs"] == [-1.5]
    assert chunk["top_logprobs"] == [
        [
            {"rank": 2, "token_id": 7, "token": "7", "logprob": -1.5},
            {"rank": 1, "token_id": 3, "token": "3", "logprob": -0.5},
        ]
    ]
    assert token_chunk((7,), (), str, None) == {"token_ids": [7], "index": 0}


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (FinishReason.STOP, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.CANCELLED, "cancelled"),
    ],
)
def test_an_end_has_its_reason_and_usage(reason: FinishReason, name: str) -> None:
    chunk = final_chunk(reason, 10, 8, 3)
    assert chunk["finish_reason"] == name
    assert chunk["completion_usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


SOON = 60.0


async def idle(worker) -> None:
    async with asyncio.timeout(SOON):
        while worker.service.open_requests():
            await asyncio.sleep(0.001)


def test_a_request_gets_its_tokens_and_one_end() -> None:
    async def run() -> None:
        async with answering() as worker:
            tokens, chunks = await collected(worker.generate(body(), "a"))
            assert tokens == expected_tokens((1, 2, 3), 1, 5, frozenset())
            ends = [chunk for chunk in chunks if "finish_reason" in chunk]
            assert ends == [chunks[-1]]
            assert ends[0]["finish_reason"] == "length"
            assert ends[0]["completion_usage"]["total_tokens"] == 8

    asyncio.run(run())


def test_a_repeated_prompt_reports_cached_tokens_and_a_salt_separates() -> None:
    async def run() -> None:
        async with answering() as worker:
            prompt = tuple(range(1, 18))
            cached = []
            for number, salt in enumerate(("", "", "acme", "acme")):
                asked = {**body(*prompt), "extra_args": {"nvext": {"cache_salt": salt}}}
                _, chunks = await collected(worker.generate(asked, f"r{number}"))
                cached.append(chunks[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"])
            assert cached == [0, 16, 0, 16]

    asyncio.run(run())


def test_an_aborted_request_ends_as_cancelled_and_leaves_nothing() -> None:
    async def run() -> None:
        async with answering() as worker:
            seen, leash = [], Leash(worker.runner, 3)
            async for chunk in worker.generate(body(max_tokens=190), "a"):
                seen.append(chunk)
                worker.abort("a")
                leash.free.set()
            assert seen[-1]["finish_reason"] == "cancelled"
            await idle(worker)
            worker.abort("a")

    asyncio.run(run())


def test_a_stream_that_is_left_ends_its_request() -> None:
    async def run() -> None:
        async with answering() as worker:
            async with aclosing(worker.generate(body(max_tokens=190), "a")) as chunks:
                await anext(chunks)
            await idle(worker)

    asyncio.run(run())


def test_a_draining_worker_refuses_new_requests_and_completes_open_ones() -> None:
    async def run() -> None:
        async with answering() as worker:
            open_one = asyncio.create_task(collected(worker.generate(body(max_tokens=100), "a")))
            while not worker.service.open_requests():
                await asyncio.sleep(0)
            draining = asyncio.create_task(worker.drain(SOON))
            while not worker.service.draining:
                await asyncio.sleep(0)
            with pytest.raises(Refused, match="shutting down"):
                await collected(worker.generate(body(), "b"))
            tokens, _ = await open_one
            assert len(tokens) == 100
            await draining

    asyncio.run(run())


def test_a_drain_that_takes_too_long_cuts_requests_off() -> None:
    async def run() -> None:
        async with answering() as worker:
            chunks = worker.generate(body(max_tokens=190), "a")
            first = await anext(chunks)
            await worker.drain(0.0)
            rest = [first] + [chunk async for chunk in chunks]
            assert rest[-1]["finish_reason"] in ("cancelled", "length")
            await idle(worker)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tokens", "words"), [((1, 1000), "token id 1000"), (tuple(range(200)), "the limit is 199")]
)
def test_a_prompt_that_cannot_be_served_is_refused(tokens: tuple[int, ...], words: str) -> None:
    async def run() -> None:
        async with answering() as worker:
            with pytest.raises(InvalidParameter, match=words):
                await collected(worker.generate(body(*tokens), "a"))
            assert not worker.service.open_requests()

    asyncio.run(run())


def test_a_request_that_fails_is_an_exception_with_the_cause() -> None:
    async def run() -> None:
        async with answering() as worker:
            leash, chunks = Leash(worker.runner, 3), worker.generate(body(max_tokens=190), "a")
            await anext(chunks)
            leash.free.set()
            worker.service.withdraw(worker._answers["a"], FinishReason.TIMEOUT)
            with pytest.raises(RequestFailed, match="timeout"):
                async for _ in chunks:
                    pass

    asyncio.run(run())

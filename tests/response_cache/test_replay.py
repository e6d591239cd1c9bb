import asyncio
from dataclasses import replace

import pytest

from headrace.core.events import Emitted, Finished
from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason, Request
from headrace.response_cache.lookup import TOKENS_AT_ONCE, Pace, tell_paced, tell_whole
from headrace.response_cache.rules.entry import Entry, Pulse
from headrace.service.answer import Answer

TOKENS = tuple(range(100))
ENTRY = Entry(
    TOKENS,
    FinishReason.STOP,
    3,
    1.0,
    0.0,
    60.0,
    60.0,
    logprobs=tuple(TokenLogprob(token, -1.0, 1, ()) for token in TOKENS),
    stop_token=99,
    pulses=(Pulse(0.01, 1), Pulse(0.03, 60), Pulse(0.05, 39)),
)


def pieces(answer):
    reported = answer._unread
    assert [type(event) for _, event in reported] == [Emitted] * (len(reported) - 1) + [Finished]
    for _, event in reported[:-1]:
        assert tuple(score.token for score in event.logprobs) == event.tokens
    end = reported[-1][1]
    assert (end.reason, end.stop_token, end.prompt_tokens, end.output_tokens) == (
        FinishReason.STOP,
        99,
        3,
        100,
    )
    assert answer.cached_tokens == [3]
    assert tuple(token for _, event in reported[:-1] for token in event.tokens) == TOKENS
    return [len(event.tokens) for _, event in reported[:-1]]


def answer(interval):
    return Answer([Request("r", (1, 2, 3))], interval)


def test_a_replay_without_streaming_is_sent_in_one_part():
    whole = answer(False)
    tell_whole(whole, 0, ENTRY)
    assert pieces(whole) == [100]


@pytest.mark.parametrize(
    ("pace", "lengths"),
    [(Pace.IMMEDIATE, [TOKENS_AT_ONCE] * 3 + [4]), (Pace.ORIGINAL, [1, 60, 39])],
)
def test_a_replayed_stream_has_chunks_and_ends_with_the_last(pace, lengths):
    streamed = answer(True)
    asyncio.run(tell_paced(streamed, 0, ENTRY, pace))
    assert pieces(streamed) == lengths


def test_the_original_pace_takes_its_time():
    async def run():
        slow = replace(ENTRY, pulses=(Pulse(0.0, 50), Pulse(30.0, 50)))
        streamed = answer(True)
        task = asyncio.create_task(tell_paced(streamed, 0, slow, Pace.ORIGINAL))
        assert len(await streamed.read()) == 1
        await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()

    asyncio.run(run())


def test_an_answer_without_tokens_ends_at_once():
    empty = answer(True)
    asyncio.run(tell_paced(empty, 0, replace(ENTRY, tokens=(), logprobs=(), pulses=()), Pace.ORIGINAL))
    assert [type(event) for _, event in empty._unread] == [Finished]

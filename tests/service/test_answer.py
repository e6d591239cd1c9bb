from __future__ import annotations

import pytest

from headrace.core.events import Emitted, Finished
from headrace.core.request import FinishReason, Request
from headrace.service.answer import MOST_TOKENS, WINDOW_SECONDS, Answer, StreamPace


def test_the_first_token_is_timed_whether_or_not_its_reader_is_woken() -> None:
    for interval in (0, 1):
        answer = Answer([Request("a", (1,)), Request("b", (1,))], interval)
        assert answer.first_token_at is None
        answer.tell(1, Emitted("b", (7,)))
        first = answer.first_token_at
        assert first is not None
        answer.tell(0, Emitted("a", (7,)))
        answer.tell(0, Finished("a", FinishReason.STOP, 1, 1, 0))
        assert answer.first_token_at == first


class Woken:
    """A reader that counts how often it is woken."""

    def __init__(self) -> None:
        self.count = 0

    def wake(self) -> None:
        self.count += 1


def test_a_reader_is_woken_once_until_it_reads() -> None:
    answer, reader = Answer([Request("a", (1,)), Request("b", (1,))], 2), Woken()
    answer.wakes(reader)
    counts = []
    for event in (
        *(Emitted("a", (1,)), Emitted("a", (2,)), Emitted("b", (3,))),  # the first token of a is enough
        Finished("b", FinishReason.STOP, 1, 1, 0),
    ):
        answer.tell("ab".index(event.request_id), event)
        counts.append(reader.count)
    assert counts == [1, 1, 1, 1]
    assert len(answer.take()) == 4
    answer.tell(0, Emitted("a", (4,)))
    assert reader.count == 1  # the tokens are counted from the first of b on
    answer.tell(0, Emitted("a", (5,)))
    assert reader.count == 2
    answer.take()
    answer.wakes(None)
    answer.tell(0, Finished("a", FinishReason.STOP, 1, 1, 0))
    assert reader.count == 2
    answer.wakes(reader)  # all has arrived before
    assert reader.count == 3


SHARE = 0.25
EVENT_SECONDS = 40e-6
STEP_SECONDS = 0.01


class Loop:
    """An event loop with its clock and its CPU time."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.pace = StreamPace(SHARE, lambda: self.now, lambda: self.used)

    def run(self, streams: int, seconds: float, beside: float = 0.0) -> float:
        """Steps in which each stream gets a token; returns the share of the time in which events were written.

        ``beside`` are CPU seconds of other work between two steps.
        """
        until, busy, events = self.now + seconds, 0.0, 0.0
        while self.now < until:
            self.pace.begin()
            events += streams / self.pace.tokens
            written = int(events) * EVENT_SECONDS
            events -= int(events)
            busy += written
            self.used += written
            self.pace.end()
            self.used += beside
            self.now += STEP_SECONDS
        return busy / seconds


@pytest.mark.parametrize("streams", [1, 16, 62])
def test_each_token_is_an_event_while_writing_takes_less_than_the_share(streams: int) -> None:
    loop = Loop()
    loop.run(streams, 2.0)
    assert loop.pace.tokens == 1


@pytest.mark.parametrize("streams", [100, 256, 800])
def test_more_streams_gather_tokens_until_writing_takes_the_share(streams: int) -> None:
    loop = Loop()
    loop.run(streams, 2 * WINDOW_SECONDS)
    gathered = loop.pace.tokens
    assert loop.run(streams, 2.0) <= SHARE
    assert abs(loop.pace.tokens - gathered) <= 1
    needed = streams * EVENT_SECONDS / STEP_SECONDS / SHARE
    assert needed <= loop.pace.tokens <= needed + 2


def test_a_stream_waits_for_a_limited_number_of_tokens() -> None:
    loop = Loop()
    loop.run(10_000, 2.0)
    assert loop.pace.tokens == MOST_TOKENS


def test_work_beside_writing_gathers_no_tokens() -> None:
    loop = Loop()
    loop.run(16, 2.0, beside=0.9 * STEP_SECONDS)
    assert loop.pace.tokens == 1


def test_streams_get_each_token_again_when_the_load_is_over() -> None:
    loop = Loop()
    loop.run(800, 2.0)
    loop.run(1, 5 * WINDOW_SECONDS)
    assert loop.pace.tokens == 1
    loop.run(256, 1.0)
    loop.now += 60.0  # nothing is streamed
    loop.run(1, 3 * WINDOW_SECONDS)
    assert loop.pace.tokens == 1


def test_a_step_that_begins_before_the_end_of_another_is_counted_once() -> None:
    loop = Loop()
    pace = loop.pace
    for _ in range(3):
        pace.begin()
        loop.used += 0.05
        pace.begin()
        loop.used += 0.05
        pace.end()
        loop.now += 0.2
        pace.end()
    assert pace.tokens == 2  # 0.3 s in 0.6 s


def told(answer: Answer, index: int) -> bool:
    """Whether a read is due after a further token of a sequence."""
    answer.tell(index, Emitted(answer.requests[index].id, (7,)))
    return is_due(answer)


def is_due(answer: Answer) -> bool:
    """Whether a read is due; it is read then."""
    reading = answer.read()
    try:
        reading.send(None)
    except StopIteration:
        return True
    except RuntimeError:  # it would wait, which needs a loop
        return False
    raise AssertionError("it neither waits nor returns")


def test_an_answer_gathers_what_the_pace_says_after_its_first_token() -> None:
    pace = StreamPace(SHARE)
    pace.tokens = 4
    answer = Answer([Request("a", (1,)), Request("b", (1,))], 1, pace)
    assert told(answer, 0)
    assert not told(answer, 0)
    assert told(answer, 1)  # its own first token; the other's is read with it
    assert [told(answer, 0) for _ in range(4)] == [False, False, False, True]
    pace.tokens = 1
    assert told(answer, 1)
    pace.tokens = 4
    assert not told(answer, 1)
    answer.tell(1, Finished("b", FinishReason.LENGTH, 1, 3, 0))
    assert is_due(answer)


def test_the_servers_interval_is_the_least() -> None:
    pace = StreamPace(SHARE)
    answer = Answer([Request("a", (1,))], 3, pace)
    assert told(answer, 0)
    assert [told(answer, 0) for _ in range(3)] == [False, False, True]
    exact = Answer([Request("a", (1,))], 1)
    pace.tokens = 8
    assert [told(exact, 0) for _ in range(3)] == [True] * 3

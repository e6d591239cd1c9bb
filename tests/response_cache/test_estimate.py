"""What an estimate counts, by time and by the memory that it may take."""

from __future__ import annotations

import pytest

from headrace.core.events import Layer
from headrace.core.images import ImageSpan
from headrace.core.request import Request, SamplingParams
from headrace.response_cache.estimate import Estimate, LoggedCall, PrefixBlocks, Sent
from headrace.response_cache.lookup import keyed
from headrace.response_cache.query import LookupRequest, Turn
from headrace.response_cache.rules.cacheability import NO_DIRECTIVES, CacheDirectives

KEYS = b"k" * 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


def call(
    *tokens: int,
    at: float | None = None,
    seconds: float | None = None,
    control: CacheDirectives = NO_DIRECTIVES,
    params: SamplingParams = GREEDY,
    times: int = 1,
) -> LoggedCall:
    request = Request("r", tokens, params)
    sent = Sent(keyed(LookupRequest(request, control), KEYS, similar=False), 5.0)
    return LoggedCall([sent], KEYS, at, seconds, times)


def fold(*calls: LoggedCall, **more: object) -> Estimate:
    made = Estimate(**{"ttl": 60.0, "num_blocks": 100, "block_size": 2, **more})  # type: ignore[arg-type]
    for each in calls:
        made.add(each)
    return made


def hits(made: Estimate) -> tuple[int, int]:
    saved = made.tally.saved
    return saved[Layer.EXACT].requests, saved[Layer.COALESCED].requests


def test_a_repeat_saves_its_prompt_and_its_output() -> None:
    made = fold(call(1, 2, 3), call(1, 2, 3), call(1, 2, 4))
    assert hits(made) == (1, 0)
    saved = made.tally.saved[Layer.EXACT]
    assert (saved.prompt_tokens, saved.output_tokens) == (3, 5.0)
    assert made.tally.total.prompt_tokens == 9
    assert made.tally.saved[Layer.PREFIX].prompt_tokens == 2  # of the third
    assert made.tally.prefix_alone.prompt_tokens == 2 + 2
    assert made.tally.together().prompt_tokens == 5


@pytest.mark.parametrize(
    ("second", "control", "expected"),
    [
        (1.0, NO_DIRECTIVES, (0, 1)),  # the first takes two seconds
        (2.0, NO_DIRECTIVES, (1, 0)),
        (61.9, NO_DIRECTIVES, (1, 0)),
        (62.0, NO_DIRECTIVES, (0, 0)),  # it has expired
        (30.0, CacheDirectives(max_age=10.0), (0, 0)),
        (30.0, CacheDirectives(no_cache=True), (0, 0)),
        (30.0, CacheDirectives(tags=("x",)), (0, 0)),
    ],
)
def test_times_tell_hits_from_coalesced_requests_and_from_expired_ones(
    second: float, control: CacheDirectives, expected: tuple[int, int]
) -> None:
    first = call(1, 2, 3, at=0.0, seconds=2.0)
    assert hits(fold(first, call(1, 2, 3, at=second, seconds=2.0, control=control))) == expected


def test_its_own_lifetime_counts() -> None:
    brief = call(1, 2, 3, at=0.0, seconds=0.0, control=CacheDirectives(ttl=5.0))
    assert hits(fold(brief, call(1, 2, 3, at=6.0, seconds=0.0))) == (0, 0)


def test_a_pool_is_filled_before_it_serves() -> None:
    sampled = call(
        1, 2, 3, params=SamplingParams(temperature=1.0, max_tokens=5), control=CacheDirectives(samples=2)
    )
    assert hits(fold(*[sampled] * 5)) == (3, 0)


def test_samples_are_counted_as_repeats_and_not_as_hits() -> None:
    sampled = [call(1, 2, 3, params=SamplingParams(temperature=1.0, max_tokens=5))] * 3
    made = fold(*sampled)
    assert hits(made) == (0, 0)
    bypassed = made.tally.bypassed["sampled without a seed"]
    assert (bypassed.requests, bypassed.repeats) == (3, 2)
    assert made.tally.saved[Layer.PREFIX].requests == 2


def test_a_row_of_a_history_counts_as_often_as_it_was_asked() -> None:
    several = fold(call(1, 2, 3, times=4), call(1, 2, 3))
    single = fold(*[call(1, 2, 3)] * 5)
    assert several.tally.saved == single.tally.saved
    assert several.tally.total == single.tally.total


def test_memory_is_bounded_and_what_is_forgotten_is_counted() -> None:
    calls = [call(number, 2, 3) for number in range(5)]
    made = fold(*calls, *calls, most_keys=3)
    assert hits(made) == (0, 0)
    assert made.forgotten == 7


def test_a_time_before_an_earlier_one_is_counted() -> None:
    made = fold(call(1, 2, at=5.0), call(1, 3, at=4.0))
    assert made.tally.disordered == 1


def test_a_prompt_longer_than_the_memory_is_not_stored() -> None:
    blocks = PrefixBlocks(2, 2)
    long, short = Request("r", tuple(range(10))), Request("r", (7, 8, 9))
    assert [blocks.admit(each, KEYS) for each in (long, long, short, short)] == [0, 0, 0, 2]
    assert blocks.admit(short, b"another model") == 0


def test_another_image_is_another_prompt() -> None:
    def shown(digest: bytes) -> LoggedCall:
        request = Request("r", (1, 2, 3, 4, 5), GREEDY, images=(ImageSpan(2, 2, digest),))
        turn = LookupRequest(request, turn=lambda: Turn("text", b"context"))
        query = keyed(turn, KEYS, similar=True)
        assert query.allowed.exact
        assert not query.allowed.semantic
        assert not query.partition
        return LoggedCall([Sent(query, 5.0)], KEYS, None, None)

    made = fold(shown(bytes(32)), shown(b"1" * 32), shown(bytes(32)))
    assert hits(made) == (1, 0)
    assert made.tally.saved[Layer.PREFIX].prompt_tokens == 2  # before the second image

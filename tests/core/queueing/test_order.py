from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.events import Admitted
from headrace.core.knobs import Knobs
from headrace.core.queueing.order import (
    TOKEN_BYTES,
    ByPriority,
    FirstComeFirstServed,
    ShortestFirst,
    order_job,
    token_bytes,
)
from headrace.core.request import Request
from headrace.testing.engines import Record, drain, hashing_engine
from tests.doubles.scenes import request


def test_first_come_ignores_priority():
    policy = FirstComeFirstServed()
    assert policy.rank(request("a", priority=9), 1) < policy.rank(request("b", priority=-9), 2)


def test_lower_priority_first_then_arrival():
    policy = ByPriority()
    ranks = [policy.rank(request("r", priority=p), n) for n, p in enumerate([1, 0, -1, 0])]
    assert sorted(range(4), key=ranks.__getitem__) == [2, 1, 3, 0]


def test_patience_weighs_waiting_against_work_and_may_change_between_two_requests():
    patience = 0.0
    policy = ShortestFirst(lambda each: float(len(each.tokens)), lambda: patience)
    long, short = request("long", 8, arrived=0.0), request("short", 2, arrived=5.0)
    assert policy.rank(long, 1) == (0.0, 1)  # by age alone
    assert policy.rank(long, 1) < policy.rank(short, 2)
    patience = 1.0
    assert policy.rank(long, 1) > policy.rank(short, 2)  # 8 seconds of work, and 5 + 2


def test_groups_that_decode_most_per_token_of_prefill_go_first_and_stay_together():
    prompts = [b"ABx", b"CD", b"Az", b"ABy", b"CE"]
    outputs = [1.0, 30.0, 2.0, 10.0, 30.0]
    assert [prompts[i] for i in order_job(prompts, outputs, grain=1)] == [b"CD", b"CE", b"ABy", b"ABx", b"Az"]


def test_prefixes_shorter_than_a_grain_do_not_bind():
    prompts = [b"AAAA1111", b"BBBB2222", b"AAAA3333", b"BBBB4444"]
    outputs = [4.0, 3.0, 2.0, 1.0]
    assert order_job(prompts, outputs, grain=8) == [0, 1, 2, 3]
    assert order_job(prompts, outputs, grain=4) == [0, 2, 1, 3]


def test_the_order_of_the_tree_is_that_of_tokens_whatever_their_size():
    prompts = [token_bytes(tokens) for tokens in ((7, 70_000, 1), (70_000, 7), (7, 70_000, 2), (70_000, 8))]
    assert order_job(prompts, [2.0, 1.0, 1.0, 2.0], grain=TOKEN_BYTES) in ([0, 2, 3, 1], [3, 1, 0, 2])


def test_an_empty_job_and_equal_prompts():
    assert order_job([], [], grain=4) == []
    assert order_job([b"same"] * 5, [1.0] * 5, grain=2) == [0, 1, 2, 3, 4]


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.text("ab", max_size=7), st.floats(0, 100)), max_size=30),
    st.integers(1, 3),
)
def test_every_request_comes_once_and_every_prefix_in_one_run(job, grain):
    prompts = [text.encode() for text, _ in job]
    order = order_job(prompts, [output for _, output in job], grain)
    assert sorted(order) == list(range(len(prompts)))
    for depth in range(grain, 8, grain):
        keys = [prompts[i][:depth] for i in order if len(prompts[i]) >= depth]
        runs = [key for place, key in enumerate(keys) if place == 0 or keys[place - 1] != key]
        assert len(runs) == len(set(runs)), "a prefix was left and come back to"


def job(rng: random.Random) -> list[Request]:
    """Questions about six documents, as they come from many users: in no order."""
    documents = [tuple(rng.randrange(1000) for _ in range(64)) for _ in range(6)]
    requests = [
        request(
            f"r{i}",
            documents[i % 6] + tuple(rng.randrange(1000) for _ in range(8)),
            max_tokens=rng.randint(2, 12),
        )
        for i in range(60)
    ]
    rng.shuffle(requests)
    return requests


def computed_prompt_tokens(requests: list[Request]) -> int:
    engine, _ = hashing_engine(
        num_blocks=64, block_size=4, max_num_seqs=4, max_model_len=96, knobs=Knobs(batched_tokens=96)
    )
    record = Record()
    for each in requests:
        engine.submit(each, 0.0)
    drain(engine, record, 0.0)
    return sum(event.known_tokens - event.cached_tokens for event in record.of(Admitted))


def test_a_job_in_order_computes_each_prefix_once_where_arrival_order_computes_it_again_and_again():
    requests = job(random.Random(3))
    keys = [token_bytes(each.tokens) for each in requests]
    order = order_job(keys, [each.params.max_tokens or 0 for each in requests], grain=4 * TOKEN_BYTES)
    ordered = computed_prompt_tokens([requests[i] for i in order])
    assert ordered <= 6 * 64 + 60 * 8 + 60 * 4, (
        "six documents and sixty questions, a block more for each at most"
    )
    assert computed_prompt_tokens(requests) > 2.5 * ordered

from __future__ import annotations

import itertools

import pytest

from headrace.lab.workload.work import POOL_TOKENS, WIDE, Call, Span, Synthesis, replayed

NARROW = range(10, 500)


@pytest.mark.parametrize("vocabulary", [WIDE, NARROW])
def test_equal_spans_give_equal_tokens_and_streams_differ_at_once(vocabulary):
    synthesis = Synthesis(vocabulary)
    streams = [synthesis.span(Span(stream, 0, 512)) for stream in range(2000)]
    assert all(len(tokens) == 512 for tokens in streams)
    assert synthesis.span(Span(7, 0, 512)) == Synthesis(vocabulary).span(Span(7, 0, 512)) == streams[7]
    assert len({tokens[:4] for tokens in streams}) == 2000
    assert all(token in vocabulary for token in itertools.chain.from_iterable(streams[:50]))
    if vocabulary is WIDE:
        assert len({tokens[0] for tokens in streams}) == 2000


@pytest.mark.parametrize("vocabulary", [WIDE, NARROW])
@pytest.mark.parametrize("cut", [1, 2, 3, 5, 300])
def test_a_stream_may_be_read_in_pieces(vocabulary, cut):
    synthesis = Synthesis(vocabulary)
    whole = synthesis.span(Span(3, 0, 400))
    assert synthesis.span(Span(3, 0, cut)) + synthesis.span(Span(3, cut, 400 - cut)) == whole


def test_a_stream_may_be_longer_than_the_pool():
    synthesis = Synthesis(NARROW)
    whole = synthesis.span(Span(5, 0, POOL_TOKENS + 100))
    assert len(whole) == POOL_TOKENS + 100
    assert whole[-50:] == synthesis.span(Span(5, POOL_TOKENS + 50, 50))


def test_calls_without_content_share_nothing_with_anybody():
    synthesis = Synthesis()
    alone = Call(0.0, 20, 4)
    prompts = {synthesis.prompt(alone)[0] for _ in range(100)}
    prompts |= {synthesis.span(Span(stream, 0, 1))[0] for stream in range(100)}
    assert len(prompts) == 200
    assert len(synthesis.prompt(alone)) == 20
    assert len(synthesis.answer(alone)) == 4


def test_a_trace_is_replayed_with_exact_lengths():
    calls = [
        Call(0.0, 600, 3, content=(Span(1, 0, 512), Span(2, 0, 88))),
        Call(1.5, 512, 9, "b", "flex", content=(Span(1, 0, 512),)),
    ]
    first, second = replayed(calls, Synthesis(NARROW))
    assert (len(first.prompt), first.max_tokens, first.arrival) == (600, 3, 0.0)
    assert first.prompt[:512] == second.prompt
    assert second.ignore_eos
    assert (second.tenant, second.service_class) == ("b", "flex")

from __future__ import annotations

import pytest

from benchmarks.peers.vocabulary import WORDS
from benchmarks.peers.workloads import NAMES, SHARED_TOKENS, workload


@pytest.mark.parametrize("name", NAMES)
def test_rounds_have_equal_lengths_and_other_prompts(name):
    load = workload(name, 6, 6)
    first, second = load.draw(0), load.draw(1)
    assert [(len(w.prompt), w.max_tokens) for w in first] == [(len(w.prompt), w.max_tokens) for w in second]
    assert not {w.prompt for w in first} & {w.prompt for w in second}
    assert first == load.draw(0)


@pytest.mark.parametrize("name", NAMES)
def test_answers_have_a_set_length_and_prompts_only_words(name):
    for work in workload(name).draw():
        assert work.ignore_eos
        assert min(work.prompt) >= WORDS


def test_lengths_of_the_mixed_loop_are_spread_around_their_medians_and_bounded():
    load = workload("mixed", 32, 400)
    prompts = sorted(len(work.prompt) for work in load.draw())
    answers = sorted(work.max_tokens for work in load.draw())
    assert 110 < prompts[200] < 150
    assert 55 < answers[200] < 75
    assert prompts[-1] <= 1024
    assert answers[-1] <= 512
    assert load.longest <= 1536


def test_prompts_of_one_round_begin_alike_only_where_the_workload_says_so():
    for name in NAMES:
        load = workload(name, 4, 4)
        begins = [{work.prompt[:SHARED_TOKENS] for work in load.draw(number)} for number in (0, 1)]
        assert [len(begin) for begin in begins] == ([1, 1] if load.shares_prefix else [4, 4])
        assert not begins[0] & begins[1]
        assert len({work.prompt[-64:] for work in load.draw()}) == 4


def test_an_unknown_workload_is_refused():
    with pytest.raises(ValueError, match="decode, prefill, mixed, long, shared"):
        workload("sprint")


def test_decoding_of_more_requests_than_are_open_is_refused():
    with pytest.raises(ValueError, match="4 requests, 1 at once"):
        workload("decode", 1, 4)

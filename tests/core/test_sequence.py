from __future__ import annotations

import itertools

import pytest

from headrace.core.block_keys import chained_key, root_key
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.sequence import TRANSITIONS, Sequence, Status


def sequence(tokens=(1, 2, 3), max_model_len=16, eos=(), **params) -> Sequence:
    request = Request("a", tuple(tokens), SamplingParams(**params), eos_token_ids=frozenset(eos))
    return Sequence(request, (0,), max_model_len)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(Status, Status)))
def test_only_the_named_transitions_exist(old, new):
    s = sequence()
    s.status = old
    if new in TRANSITIONS[old]:
        s.enter(new)
        assert s.status is new
    else:
        with pytest.raises(ValueError, match=f"from {old} to {new}"):
            s.enter(new)


def test_every_status_but_the_last_can_end():
    assert not TRANSITIONS[Status.FINISHED]
    assert all(Status.FINISHED in TRANSITIONS[s] for s in Status if s is not Status.FINISHED)


def test_full_keys_grow_with_the_tokens_and_chain_from_the_root():
    s = sequence(range(5))
    assert s.full_keys(2) == [
        first := chained_key(root_key("", ""), (0, 1)),
        chained_key(first, (2, 3)),
    ]
    s.tokens.append(9)
    assert s.full_keys(2)[2] == chained_key(s.keys[1], (4, 9))


def test_known_counts_what_is_still_to_be_collected():
    s = sequence()
    s.pending = 2
    assert (s.known, s.output_tokens) == (5, 0)


@pytest.mark.parametrize(
    ("last", "params", "eos", "reason"),
    [
        (7, {"max_tokens": 9}, (7,), FinishReason.STOP),
        (7, {"max_tokens": 9, "ignore_eos": True}, (7,), None),
        (7, {"max_tokens": 9, "ignore_eos": True, "stop_token_ids": (7,)}, (7,), FinishReason.STOP),
        (6, {"max_tokens": 9}, (7,), None),
        (6, {"max_tokens": 1}, (7,), FinishReason.LENGTH),
        (7, {"max_tokens": 1}, (7,), FinishReason.STOP),
    ],
)
def test_what_ends_an_answer(last, params, eos, reason):
    s = sequence(eos=eos, **params)
    s.tokens.append(last)
    assert s.finish_reason() is reason


def test_the_context_bounds_an_answer_without_max_tokens():
    s = sequence(max_model_len=4)
    s.tokens.append(9)
    assert s.finish_reason() is FinishReason.LENGTH

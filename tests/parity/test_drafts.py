"""Two ways, one answer: with a drafter that lies, every request gets the tokens that it gets without drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headrace.core.engine import Engine
from headrace.core.events import Preempted, Verified
from headrace.core.request import FinishReason, Request, SamplingParams
from tests.parity.drafted_runs import (
    CONSTRAINTS,
    END,
    VOCAB,
    check_same,
    liar,
    random_requests,
    serve,
    without,
)

WAYS: list[dict[str, Any]] = [
    {},
    {"batched_tokens": 11},
    {"overlap": 1},
    {"overlap": 3, "batched_tokens": 9},
    {"blocks": 26},
    {"blocks": 26, "overlap": 1, "prefix_caching": False},
]
BATCH = 60


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_drafts_change_no_answer(way, pytestconfig):
    count = pytestconfig.getoption("--lives") // 40
    preemptions = 0
    for seed in range(0, count, BATCH):
        todo = random_requests(seed, BATCH)
        plain = serve(todo, **way)
        drafter = liar(plain, seed)
        drafted = serve(todo, drafter, **way)
        check_same(plain, drafted)
        reported = [event for event in drafted.events if isinstance(event, Verified)]
        assert sum(event.drafted for event in reported) == drafter.drafted > 100
        assert sum(event.accepted for event in reported) == drafter.accepted > 50
        preemptions += sum(isinstance(event, Preempted) for event in drafted.events)
    assert bool(preemptions) == ("blocks" in way)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
def test_the_numbers_of_native_kernels_do_not_depend_on_drafts(kv_dtype):
    """Bit for bit: a query's result depends neither on its tile nor on the rest of the batch."""
    todo = random_requests(7, 30)
    plain = serve(todo, kernels="cpp", kv_dtype=kv_dtype)
    drafted = serve(todo, liar(plain, 7), kernels="cpp", kv_dtype=kv_dtype)
    assert drafted.answers == plain.answers
    assert sum(event.accepted for event in drafted.events if isinstance(event, Verified)) > 50


FEATURES: dict[str, dict[str, Any]] = {
    "schema": {"structured_outputs": CONSTRAINTS[2], "max_tokens": 24},
    "regex to its end": {"structured_outputs": {"regex": "[ab]{3}-[0-9]{4}"}, "max_tokens": 40},
    "stop token": {"stop_token_ids": tuple(range(0, VOCAB, 7)), "ignore_eos": True},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "min_tokens": {"min_tokens": 9, "logit_bias": ((END, 9.0),)},
    "bad words": {"bad_words": tuple((token,) for token in range(0, VOCAB, 3))},
    "allowed": {"allowed_token_ids": (*range(0, VOCAB, 5), END)},
}
"""Each with drafts, alone and over several seeds of one prompt."""


@pytest.mark.parametrize("way", [{}, {"blocks": 26, "overlap": 1, "batched_tokens": 7}], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_with_drafts(feature, way):
    params = {"max_tokens": 14, **FEATURES[feature]}
    todo = [
        Request(
            f"r{number}",
            tuple(range(20, 33)),
            SamplingParams(temperature=(0.0, 1.0)[number % 2], **params),
            seed=number,
            eos_token_ids=frozenset({END}),
        )
        for number in range(6)
    ]
    plain = serve(todo, **way)
    drafter = liar(plain, 3)
    check_same(plain, serve(todo, drafter, **way))
    assert drafter.accepted > 0 or feature == "stop token"


@pytest.mark.parametrize("overlap", [0, 1])
def test_cancelling_requests_with_drafts_in_flight_affects_no_other_request(overlap):
    todo = random_requests(11, 40)
    plain = serve(todo)
    chance = random.Random(5)
    gone: set[str] = set()

    def cancel(engine: Engine, now: float) -> None:
        name = f"r{chance.randrange(len(todo))}"
        if chance.random() < 0.3:
            engine.cancel(name, FinishReason.CANCELLED, now)
            gone.add(name)

    drafted = serve(todo, liar(plain, 1), overlap=overlap, between=cancel)
    ended = {name for name in gone if drafted.answers[name].end.reason is FinishReason.CANCELLED}
    assert ended
    for name in ended:
        said = drafted.answers[name].tokens
        assert said == plain.answers[name].tokens[: len(said)]
    check_same(without(plain, ended), without(drafted, ended))


def test_seeds_say_the_same_whatever_overlaps():
    todo = random_requests(21, 30)
    plain = serve(todo)
    for overlap in (1, 3):
        check_same(plain, serve(todo, liar(plain, overlap), overlap=overlap))

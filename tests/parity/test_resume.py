"""An answer taken up where it was left is the answer: stored tokens are known tokens, and everything else follows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.core.events import Admitted, Preempted
from headrace.core.request import FinishReason
from headrace.testing.engines import Record, drain, hashing_engine
from tests.doubles.scenes import request
from tests.parity import test_local_runner as local
from tests.parity.test_core_parity import WAYS, crowd, texts

WAYS = {"plain": {}} | {way: settings for way, settings in WAYS.items() if way != "whole prompts"}


@pytest.mark.parametrize("way", WAYS)
def test_the_core_goes_on_with_what_was_answered(way):
    """Whatever else happens to them; a crowd whose answers begin at random places ends as one that began at 0."""
    whole = texts(7)
    rng = random.Random(7)
    engine, _ = hashing_engine(**{"num_blocks": 400, "max_num_seqs": 16, "max_model_len": 64} | WAYS[way])
    record = Record()
    begun = {}
    for each in crowd(7):
        begun[each.id] = tuple(whole.tokens[each.id][: rng.randrange(len(whole.tokens[each.id]) + 1)])
        engine.submit(replace(each, answered=begun[each.id]), 0.0)
        record.fold(engine.step(0.0))
    drain(engine, record)
    engine.check_consistency()
    for each, known in begun.items():
        assert [*known, *record.tokens.get(each, [])] == whole.tokens[each]
        assert [end._replace(cached_tokens=0) for end in record.ends[each]] == [
            end._replace(cached_tokens=0) for end in whole.ends[each]
        ]
    assert bool(record.of(Preempted)) == way.startswith("preempted")


def test_an_interrupted_answer_finds_its_blocks_again():
    engine, runner = hashing_engine(max_model_len=128)
    asked = request("a", 9, max_tokens=60)
    alone = Record()
    engine.submit(asked, 0.0)
    drain(engine, alone)
    engine.reset_prefix_cache()
    interrupted = Record()
    engine.submit(asked, 0.0)
    for _ in range(30):
        interrupted.fold(engine.step(0.0))
    engine.cancel("a", FinishReason.CANCELLED, 0.0)
    drain(engine, interrupted)
    before = runner.computed_tokens
    resumed = Record()
    known = tuple(interrupted.tokens["a"])
    engine.submit(replace(asked, id="b", answered=known), 0.0)
    drain(engine, resumed)
    assert [*known, *resumed.tokens["b"]] == alone.tokens["a"]
    (admitted,) = resumed.of(Admitted)
    assert admitted.cached_tokens >= 9 + len(known) - 2
    assert runner.computed_tokens - before <= 60 - len(known) + 2
    assert resumed.ends["b"][0].cached_tokens == 9, "a prompt has no more cached tokens than tokens"


@pytest.mark.parametrize("ended", [FinishReason.LENGTH, FinishReason.STOP])
def test_an_answer_that_is_known_to_its_end_computes_nothing(ended):
    stop = frozenset({5}) if ended is FinishReason.STOP else frozenset()
    engine, runner = hashing_engine()
    record = Record()
    engine.submit(request("a", 4, max_tokens=3, answered=(7, 8, 5), eos_token_ids=stop), 0.0)
    drain(engine, record)
    (end,) = record.ends["a"]
    assert (end.reason, end.output_tokens, end.stop_token) == (ended, 3, 5 if stop else None)
    assert runner.computed_tokens == 0
    assert not record.tokens
    engine.check_consistency()


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_model_goes_on_with_what_was_answered(overlap):
    """Greedy and seeded, with penalties, bad words, forced lengths: at any place where an answer may be cut."""
    whole = local.alone()
    for cut in (1, 3, 8, 13):
        todo = [
            replace(each, answered=tuple(whole[each.id][:cut]))
            for each in local.requests()
            if len(whole[each.id]) > cut
        ]
        assert len(todo) > 4
        rest = local.texts(local.run(todo, overlap=overlap))
        assert {each.id: [*each.answered, *rest[each.id]] for each in todo} == {
            each.id: whole[each.id] for each in todo
        }

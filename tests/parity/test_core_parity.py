"""Two ways, one answer: whatever the scheduler does, the text of a request is the text of that request alone."""

from __future__ import annotations

import random

import pytest

from headrace.core.events import Admitted, Chunked, Preempted
from headrace.core.knobs import Knobs
from headrace.core.request import Request
from headrace.core.scheduler.admission import StaticBatch
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import expected_tokens
from tests.doubles.scenes import request

PLAIN = {"num_blocks": 400, "max_num_seqs": 16, "max_model_len": 64}
WAYS = {
    "overlap": {"overlap": 1},
    "pipeline": {"overlap": 3},
    "no sharing": {"prefix_caching": False},
    "chunked": {"knobs": Knobs(batched_tokens=5)},
    "chunked while others decode": {"knobs": Knobs(mixed_prefill_ratio=2.0)},
    "whole prompts": {"knobs": Knobs(batched_tokens=64, chunked_prefill=False)},
    "preempted": {"num_blocks": 17},
    "preempted under overlap": {"num_blocks": 17, "overlap": 1},
    "preempted without sharing": {"num_blocks": 17, "prefix_caching": False},
    "one at a time": {"max_num_seqs": 1},
    "preempted to a host tier": {"num_blocks": 17, "host_blocks": 40},
    "preempted to a host tier under overlap": {"num_blocks": 17, "host_blocks": 40, "overlap": 1},
    "preempted to a small host tier and a disk": {"num_blocks": 17, "host_blocks": 6, "disk_blocks": 60},
    "gangs": {"admission": StaticBatch(4, 0.01)},
    "blocks of one": {"block_size": 1},
    "blocks of sixteen": {"block_size": 16},
}


def crowd(seed: int) -> list[Request]:
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(9) for _ in range(20)) for _ in range(2)]
    return [
        request(
            f"r{i}",
            rng.choice(prefixes)[: rng.randint(1, 20)]
            + tuple(rng.randrange(9) for _ in range(rng.randint(0, 9))),
            max_tokens=rng.randint(1, 30),
            seed=i % 3,
        )
        for i in range(12)
    ]


def texts(seed: int, **settings) -> Record:
    engine, _ = hashing_engine(**{**PLAIN, **settings})
    record = Record()
    for i, each in enumerate(crowd(seed)):
        engine.submit(each, 0.0)
        if i % 3 == 2:
            record.fold(engine.step(0.0))
    drain(engine, record)
    engine.check_consistency()
    return record


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_texts(way):
    preempted = cached = rows = 0
    for seed in range(6):
        plain, other = texts(seed), texts(seed, **WAYS[way])
        assert other.tokens == plain.tokens
        assert {k: v[0].reason for k, v in other.ends.items()} == {
            k: v[0].reason for k, v in plain.ends.items()
        }
        preempted += len(other.of(Preempted))
        cached += sum(event.cached_tokens for event in other.of(Admitted))
        rows += len(other.of(Chunked)) > len(plain.of(Chunked))
    assert bool(preempted) == way.startswith("preempted"), "the way was not gone"
    assert bool(cached) == (WAYS[way].get("prefix_caching") is not False)
    assert rows or not way.startswith("chunked")


@pytest.mark.parametrize("overlap", [2, 3, 4])
def test_a_row_of_an_earlier_stay_is_not_taken_for_one_of_the_present(overlap):
    """Preempted and back again while rows are still in flight: only the epoch tells them apart."""
    preempted = 0
    for seed in range(40):
        rng = random.Random(seed)
        engine, _ = hashing_engine(
            num_blocks=rng.randint(16, 24),
            block_size=rng.choice([1, 2]),
            max_model_len=16,
            max_num_seqs=6,
            overlap=overlap,
        )
        requests = [request(f"r{i}", rng.randint(1, 8), max_tokens=rng.randint(1, 8)) for i in range(8)]
        record = Record()
        for each in requests:
            engine.submit(each, 0.0)
        drain(engine, record)
        preempted += len(record.of(Preempted))
        for each in requests:
            length = each.params.max_tokens
            assert record.tokens[each.id] == expected_tokens(each.tokens, 0, length, frozenset())
    assert preempted

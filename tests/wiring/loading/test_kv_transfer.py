"""Loaded models that exchange blocks: the tokens are those of a server without peers, whatever becomes of a peer."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from headrace.config import ConfigError
from headrace.config.merge import options
from headrace.core.engine import Engine
from headrace.core.events import Admitted, Event, Finished
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.peers import Pulled
from headrace.core.request import Request, SamplingParams
from headrace.wiring.loading.kv_transfer import OpenTransfer
from headrace.wiring.model import Loaded, close, load
from tests.doubles.scenes import texts

BLOCK_BYTES = 48 << 10  # of 16 tokens of the built-in model in float32
SETTINGS = {
    "model": "builtin",
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_transfer_secret": "a secret",
    "kv_offload_bytes": 200 * BLOCK_BYTES,
}


def loaded(role: str, peer: Loaded | None = None, blocks: int = 200, **given: object) -> Loaded:
    config: dict[str, object] = {"kv_connector": "SharedMemoryConnector", "kv_role": role, "kv_port": 0}
    if peer is not None:
        host, port = address(peer)
        config["kv_connector_extra_config"] = {"peers": [f"{host}:{port}"], "timeout_seconds": 5}
    settings = {**SETTINGS, "kv_cache_memory_bytes": blocks * BLOCK_BYTES, **given}
    made = load(options({**settings, "kv_transfer_config": json.dumps(config)}))
    lower = made.engine.scheduler.pool.lower
    if lower is not None:
        lower._restore = AlwaysRestore()  # so small a model computes faster
    return made


def address(server: Loaded) -> tuple[str, int]:
    assert isinstance(server.transfer, OpenTransfer)
    sharing = server.transfer.sharing()
    return sharing.host, sharing.port


def run(engine: Engine, requests: list[Request]) -> list[Event]:
    """Serve requests together until all have ended."""
    seen: list[Event] = []
    for request in requests:
        engine.submit(request, time.monotonic())
    while sum(isinstance(event, Finished) for event in seen) < len(requests):
        seen += engine.step(time.monotonic())
    engine.check_consistency()
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_blocks, "a block is not given back"
    return seen


def cached(events: list[Event]) -> int:
    return sum(event.cached_tokens for event in events if isinstance(event, Finished))


def prompts(seed: int, count: int = 6) -> list[Request]:
    rng = random.Random(seed)
    shared = tuple(rng.randrange(3, 900) for _ in range(90))
    return [
        Request(
            f"r{i}",
            (
                *shared[: rng.choice([0, 40, 90])],
                *(rng.randrange(3, 900) for _ in range(rng.randint(20, 120))),
            ),
            SamplingParams(max_tokens=6, temperature=rng.choice([0.0, 1.0]), ignore_eos=True),
            seed=i,
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Loaded, Loaded, Loaded]]:
    """One that publishes, one that pulls from it, and one alone."""
    producer = loaded("kv_producer")
    consumer = loaded("kv_both", producer)
    alone = load(options({"model": "builtin", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8}))
    yield producer, consumer, alone
    for server in (consumer, producer, alone):
        close(server)


def test_tokens_are_equal_and_what_a_peer_computed_is_cached(servers):
    producer, consumer, alone = servers
    requests = prompts(1)
    expected = texts(run(alone.engine, requests))
    assert texts(run(producer.engine, requests)) == expected
    pulled = run(consumer.engine, requests)
    assert texts(pulled) == expected
    assert sum(event.blocks for event in pulled if isinstance(event, Pulled)) > 20
    whole = sum((len(request.tokens) - 1) // 16 * 16 for request in requests)
    assert cached(pulled) >= whole, "all whole blocks"


def test_blocks_that_were_pulled_can_be_pulled_again(servers):
    producer, consumer, _ = servers
    requests = prompts(1)
    run(producer.engine, requests)
    expected = texts(run(consumer.engine, requests))
    third = loaded("kv_consumer", consumer)
    try:
        events = run(third.engine, requests)
        assert texts(events) == expected
        assert sum(event.blocks for event in events if isinstance(event, Pulled)) > 20
    finally:
        close(third)


def test_tenants_do_not_share_over_servers(servers):
    producer, consumer, alone = servers
    requests = [replace(request, salt="a tenant") for request in prompts(2)]
    run(producer.engine, requests)
    others = [replace(request, salt="another tenant") for request in requests]
    by_others = run(consumer.engine, others)
    assert not any(isinstance(event, Pulled) for event in by_others)
    assert texts(by_others) == texts(run(alone.engine, requests))
    mine = run(consumer.engine, [replace(request, id=f"{request.id}-mine") for request in requests])
    assert any(isinstance(event, Pulled) for event in mine)


def test_other_weights_are_refused_and_the_request_is_computed(servers, caplog):
    producer = servers[0]
    other = loaded("kv_consumer", producer, load_format="dummy")
    try:
        requests = prompts(3)
        run(producer.engine, requests)
        events = run(other.engine, requests)
        assert not any(isinstance(event, Pulled) for event in events)
        assert "the servers differ in weights" in caplog.text
    finally:
        close(other)


def test_a_producer_that_evicts_all_the_time_and_then_ends(servers):
    """Its blocks are overwritten while they are read; at last it is closed in the middle of a transfer."""
    _, _, alone = servers
    small = loaded("kv_producer", blocks=40, kv_offload_bytes=0)
    puller = loaded("kv_consumer", small, blocks=60, kv_offload_bytes=100 * BLOCK_BYTES)
    ended = threading.Event()
    turns: list[list[Request]] = [
        [replace(each, id=f"{seed}-{each.id}") for each in prompts(seed)] for seed in range(100, 106)
    ]
    expected = {name: text for turn in turns for name, text in texts(run(alone.engine, turn)).items()}

    def produce() -> None:
        for again in range(1000):
            for turn in turns:
                if ended.is_set():
                    return
                run(small.engine, [replace(each, id=f"{again}-{each.id}") for each in turn])

    first = [replace(turns[0][-1], id="first")]
    run(small.engine, first)
    assert any(isinstance(event, Pulled) and event.blocks for event in run(puller.engine, first))
    pool = ThreadPoolExecutor(1)
    produced = pool.submit(produce)
    try:
        for number, turn in enumerate(turns):
            if number == len(turns) - 3:
                assert small.transfer is not None
                threading.Timer(0.01, small.transfer.close).start()
            events = run(puller.engine, turn)
            assert texts(events) == {each.id: expected[each.id] for each in turn}
            assert len([event for event in events if isinstance(event, Admitted)]) >= len(turn)
    finally:
        ended.set()
        produced.result(60)
        pool.shutdown()
        close(puller)
        close(small)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_transfer_secret": None}, "needs a secret"),
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching is given"),
        ({"kv_offload_bytes": 0}, "set its size with --kv-offload-bytes"),
        ({"tensor_parallel_size": 2}, "in one process only"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_loading(given, message):
    config = {
        "kv_connector": "SharedMemoryConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"peers": ["127.0.0.1:9"]},
    }
    with pytest.raises(ConfigError, match=message):
        load(options({**SETTINGS, "kv_transfer_config": json.dumps(config), **given}))


def test_an_address_in_use_is_refused(servers):
    host, port = address(servers[0])
    config = {
        "kv_connector": "SharedMemoryConnector",
        "kv_role": "kv_producer",
        "kv_ip": host,
        "kv_port": port,
    }
    with pytest.raises(ConfigError, match=f"cannot listen at {host}:{port}"):
        load(options({**SETTINGS, "kv_transfer_config": json.dumps(config)}))

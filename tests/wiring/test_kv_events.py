"""The server's application publishes what its prefix cache holds, and refuses what cannot be published."""

from __future__ import annotations

import asyncio
import json
import random
import sys

import httpx
import msgspec
import pytest
import zmq

from headrace import build_app
from headrace.config import ConfigError, options
from headrace.observe.kv_events import END_OF_REPLAY
from headrace.wiring.observability import open_kv_events
from tests.doubles.shared_stores import free_port

GIVEN = {"model": "builtin-draft", "max_num_seqs": 2, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 256}
BLOCKS, BLOCK_BYTES = 40, 16384
"""A small KV cache of the built-in draft model in float32, with blocks of 16 tokens."""
WORDS = "one two three four five six seven eight nine ten eleven twelve " * 4


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def reported(address: str) -> list[list[object]]:
    """All events so far."""
    events: list[list[object]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 60_000)
        asking.connect(address)
        asking.send_multipart((b"", bytes(8)))
        while True:
            _, number, frame = asking.recv_multipart()
            if number == END_OF_REPLAY:
                return events
            events += msgspec.msgpack.decode(frame)[1]


def test_a_prompt_is_published_block_by_block() -> None:
    replay = free_address()
    config = json.dumps(
        {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": replay, "topic": "kv@here@builtin"}
    )
    app, running = build_app(options(GIVEN | {"kv_events_config": config}))

    async def use() -> tuple[list[int], list[list[object]]]:
        transport = httpx.ASGITransport(app)
        async with running, httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            prompt = (await client.post("/tokenize", json={"prompt": WORDS})).json()["tokens"]
            body = {"prompt": prompt, "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            while not (events := await asyncio.to_thread(reported, replay)):
                await asyncio.sleep(0.01)
            return prompt, events

    prompt, events = asyncio.run(use())
    (stored,) = [event for event in events if event[0] == "BlockStored"]
    _, hashes, parent, tokens, block_size, *_ = stored
    full = len(prompt) // block_size
    assert len(hashes) == full > 1
    assert (parent, tokens) == (None, prompt[: full * block_size])


class Reader:
    """What a router knows of the prefix cache: the hash of each stored block, by the hash before it and its tokens."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int | None, tuple[int, ...]], int] = {}
        self.removed = 0

    def read(self, events: list[list[object]]) -> None:
        self.blocks.clear()
        self.removed = 0
        for name, *fields in events:
            if name == "BlockStored":
                hashes, parent, tokens, size, *_ = fields
                for i, known in enumerate(hashes):
                    self.blocks[parent, tuple(tokens[i * size : (i + 1) * size])] = known
                    parent = known
            elif name == "BlockRemoved":
                gone = set(fields[0])
                self.removed += len(gone)
                self.blocks = {key: known for key, known in self.blocks.items() if known not in gone}
            else:
                self.blocks.clear()

    def known(self, tokens: list[int], size: int) -> int:
        """The number of leading blocks of a prompt that the cache holds."""
        before = None
        for i in range(len(tokens) // size):
            before = self.blocks.get((before, tuple(tokens[i * size : (i + 1) * size])))
            if before is None:
                return i
        return len(tokens) // size


def sample(metrics: str, name: str) -> float:
    (line,) = [line for line in metrics.splitlines() if line.startswith(name)]
    return float(line.rpartition(" ")[2])


def test_a_reader_of_the_events_counts_the_blocks_that_the_metrics_count() -> None:
    """With too little memory for all prompts: it predicts every hit, and knows no more blocks than there are."""
    replay, size, rng = free_address(), 16, random.Random(5)
    config = json.dumps({"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": replay})
    small = {
        "dtype": "float32",
        "kv_cache_memory_bytes": BLOCKS * BLOCK_BYTES,
        "block_size": size,
        "kv_events_config": config,
    }
    app, running = build_app(options(GIVEN | small))
    beginnings = [[rng.randrange(8, 500) for _ in range(96)] for _ in range(6)]
    reader, foreseen, counted = Reader(), [], []

    async def use() -> None:
        transport = httpx.ASGITransport(app)
        async with running, httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            hits = 0.0
            for _ in range(40):
                prompt = [*rng.choice(beginnings), *(rng.randrange(8, 500) for _ in range(24))]
                foreseen.append(reader.known(prompt, size))
                body = {"prompt": prompt, "max_tokens": 1}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                metrics = (await client.get("/metrics")).text
                before, hits = hits, sample(metrics, "headrace:prefix_cache_hits_total")
                counted.append((hits - before) / size)
                assert f'num_gpu_blocks="{BLOCKS}"' in metrics
                while reader.known(prompt, size) < len(prompt) // size:
                    reader.read(await asyncio.to_thread(reported, replay))
                assert len(reader.blocks) <= BLOCKS

    asyncio.run(use())
    assert foreseen == counted
    assert sum(foreseen) > 0
    assert reader.removed > 0


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching is given"),
        ({"kv_events_config": '{"endpoint": "tcp://*:none"}'}, r"tcp://\*:none cannot be bound"),
    ],
)
def test_what_cannot_be_published_is_refused(given: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_app(options(GIVEN | {"kv_events_config": '{"endpoint": "tcp://127.0.0.1:*"}'} | given))


@pytest.mark.parametrize("config", ['{"enable_kv_cache_events": false}', '{"publisher": "null"}'])
def test_it_can_be_switched_off(config: str) -> None:
    assert open_kv_events(None, options({"kv_events_config": config})) is None  # type: ignore[arg-type]


def test_without_its_packages_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "headrace.observe.kv_events", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[kv-events\]'"):
        open_kv_events(None, options({"kv_events_config": "{}"}))  # type: ignore[arg-type]

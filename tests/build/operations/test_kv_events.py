"""The server's application publishes what its prefix cache holds, and refuses what cannot be published."""

from __future__ import annotations

import asyncio
import json
import socket
import sys

import httpx
import msgspec
import pytest
import zmq

from headrace import build_app
from headrace.build.operations.kv_events import open_kv_events
from headrace.config import ConfigError, options
from headrace.observe.kv_events.wire import END_OF_REPLAY

GIVEN = {"model": "builtin-draft", "max_num_seqs": 2, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 256}
WORDS = "one two three four five six seven eight nine ten eleven twelve " * 4


def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def told(address: str) -> list[list[object]]:
    """All events so far."""
    events: list[list[object]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 20_000)
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
            while not (events := await asyncio.to_thread(told, replay)):
                await asyncio.sleep(0.01)
            return prompt, events

    prompt, events = asyncio.run(use())
    (stored,) = [event for event in events if event[0] == "BlockStored"]
    _, hashes, parent, tokens, block_size, *_ = stored
    full = len(prompt) // block_size
    assert len(hashes) == full > 1
    assert (parent, tokens) == (None, prompt[: full * block_size])


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
    monkeypatch.delitem(sys.modules, "headrace.observe.kv_events.publisher", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[kv-events\]'"):
        open_kv_events(None, options({"kv_events_config": "{}"}))  # type: ignore[arg-type]

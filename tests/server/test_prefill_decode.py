"""A prefill and a decode server behind the example's proxy: one answer, and the decode server computes no prompt."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from headrace.config import options
from headrace.wiring.server import build_app

PROMPT = "Once upon a time there was a fox who lived by the river. " * 12
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
COMMON = {
    "model": "builtin",
    "dtype": "float32",
    "kv_transfer_secret": "a secret",
    "kv_cache_memory_bytes": 32 << 20,
    "kv_offload_bytes": 32 << 20,
}


def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples/disaggregated_proxy.py"
    spec = importlib.util.spec_from_file_location("disaggregated_proxy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def serving() -> AsyncIterator[httpx.AsyncClient]:
    """A client of http://prefill, http://decode and http://proxy."""
    async with AsyncExitStack() as stack:
        mounts: dict[str, httpx.AsyncBaseTransport] = {}
        config = {"kv_connector": "SharedMemoryConnector", "kv_role": "kv_producer", "kv_port": 0}
        app, running = build_app(options(COMMON | {"kv_transfer_config": json.dumps(config)}))
        await stack.enter_async_context(running)
        mounts["http://prefill"] = httpx.ASGITransport(app)
        async with httpx.AsyncClient(mounts=mounts) as client:
            asked = BODY | {"prompt": "hello", "kv_transfer_params": {"do_remote_decode": True}}
            answer = await client.post("http://prefill/v1/completions", json=asked)
            params = answer.json()["kv_transfer_params"]
        config |= {
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {
                "peers": [f"{params['remote_host']}:{params['remote_port']}"],
                "timeout_seconds": 5,
            },
        }
        app, running = build_app(options(COMMON | {"kv_transfer_config": json.dumps(config)}))
        await stack.enter_async_context(running)
        mounts["http://decode"] = httpx.ASGITransport(app)
        inner = await stack.enter_async_context(httpx.AsyncClient(mounts=mounts))
        proxy = example().make_app(["http://prefill"], ["http://decode"], inner)
        lost = example().make_app(["http://127.0.0.1:9"], ["http://decode"], inner)
        at_once = example().make_app(["http://prefill"], ["http://decode"], inner, at_once=True)
        mounts |= {"http://at-once": httpx.ASGITransport(at_once)}
        mounts |= {"http://proxy": httpx.ASGITransport(proxy), "http://lost": httpx.ASGITransport(lost)}
        yield await stack.enter_async_context(httpx.AsyncClient(mounts=mounts))


@pytest.mark.timeout(120)
def test_the_prompt_is_computed_on_one_server_and_the_answer_on_the_other() -> None:
    async def scene() -> None:
        async with serving() as client:
            answer = (
                await client.post("http://proxy/v1/completions", json=BODY | {"request_id": "a"})
            ).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (answer["usage"]["prompt_tokens"] - 1) // 16 * 16
            alone = (await client.post("http://prefill/v1/completions", json=BODY)).json()
            assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
            reported = (await client.get("http://decode/v1/requests/cmpl-a")).json()["history"]
            assert {"peers_asked", "moved"} <= {entry["event"] for entry in reported}
            (asked,) = [entry for entry in reported if entry["event"] == "peers_asked"]
            assert asked["held_tokens"] == cached
            metrics = (await client.get("http://decode/metrics")).text
            assert f'kv_transfer_blocks_total{{model_name="builtin"}} {cached // 16}.0' in metrics

            message = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "stream": True}
            streamed = await client.post("http://proxy/v1/chat/completions", json=message)
            assert streamed.text.endswith("data: [DONE]\n\n")
            for story in ("First", "Second"):  # the first answer says where the prefill server publishes
                body = BODY | {"prompt": f"{story}: {PROMPT * 4}", "request_id": story}
                answer = (await client.post("http://at-once/v1/completions", json=body)).json()
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == (answer["usage"]["prompt_tokens"] - 1) // 16 * 16
                alone = (await client.post("http://prefill/v1/completions", json=body)).json()
                assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
            other = BODY | {"prompt": f"Another story. {PROMPT}"}
            lost = await client.post("http://lost/v1/completions", json=other)
            assert lost.status_code == 200, "the decode server computes the prompt itself"

    asyncio.run(scene())

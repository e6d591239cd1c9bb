"""The server's application mounted into another one, as a user's service does it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from headrace import build_app
from headrace.config import options
from headrace.serve.http.lifespan import lifespan_of

GIVEN = {"model": "builtin-draft", "max_num_seqs": 2, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 256}


def starlette_app(engine_app, running):
    @asynccontextmanager
    async def lifespan(app):
        async with running:
            yield

    async def hello(request):
        return PlainTextResponse("hello")

    return Starlette(routes=[Route("/hello", hello), Mount("/llm", app=engine_app)], lifespan=lifespan)


def fastapi_app(engine_app, running):
    fastapi = pytest.importorskip("fastapi")

    @asynccontextmanager
    async def lifespan(app):
        async with running:
            yield

    app = fastapi.FastAPI(lifespan=lifespan)

    @app.get("/hello", response_class=PlainTextResponse)
    async def hello():
        return "hello"

    app.mount("/llm", engine_app)
    return app


@pytest.mark.parametrize("mounted", [starlette_app, fastapi_app])
def test_the_api_answers_below_its_prefix(mounted):
    engine_app, running = build_app(options(GIVEN | {"response_cache": ("memory",)}))
    app = mounted(engine_app, running)

    async def use():
        transport = httpx.ASGITransport(app)
        async with lifespan_of(app), httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            assert (await client.get("/hello")).text == "hello"
            health = await client.get("/llm/health")
            described = (await client.get("/llm/openapi.json")).json()
            missing = await client.get("/llm/v1/nothing")
            api = AsyncOpenAI(base_url="http://here/llm/v1", api_key="none", http_client=client)
            whole = await api.completions.create(
                model="builtin-draft", prompt="Once", max_tokens=4, temperature=0
            )
            stream = await api.completions.create(
                model="builtin-draft", prompt="Once", max_tokens=4, temperature=0, stream=True
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
        return health.status_code, described["servers"], missing.status_code, whole.choices[0].text, text

    health, servers, missing, whole, text = asyncio.run(use())
    assert (health, missing) == (200, 404)
    assert servers == [{"url": "/llm"}]
    assert whole == text != ""

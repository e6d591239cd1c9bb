"""The server's application mounted into another one, as a user's service does it."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import asynccontextmanager, closing

import httpx
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from headrace import build_app
from headrace.api.app import lifespan_of
from headrace.config import options

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


def test_the_context_also_starts_what_works_beside_the_requests(tmp_path):
    """The request history is written by such a part; it was not started without a server once."""
    file = tmp_path / "history.db"
    app, running = build_app(options(GIVEN | {"response_cache": ("memory",), "history_file": str(file)}))

    async def use():
        transport = httpx.ASGITransport(app)
        async with running, httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            body = {"model": "builtin-draft", "prompt": "Once", "max_tokens": 4, "temperature": 0}
            assert (await client.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(use())
    with closing(sqlite3.connect(file)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        counts = [database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables]
    assert sum(counts) > 0


def test_keys_are_required_below_the_prefix_but_not_for_health():
    app = starlette_app(*build_app(options(GIVEN | {"api_key": "secret"})))

    async def use():
        transport = httpx.ASGITransport(app)
        async with lifespan_of(app), httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            paths = ("/llm/health", "/llm/v1/models")
            without = [(await client.get(path)).status_code for path in paths]
            with_key = await client.get("/llm/v1/models", headers={"Authorization": "Bearer secret"})
            return without, with_key.status_code

    assert asyncio.run(use()) == ([200, 401], 200)

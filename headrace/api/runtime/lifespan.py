"""Runs an application's start-up and shutdown without a server: in a batch, or mounted into another application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Message


@asynccontextmanager
async def lifespan_of(app: ASGIApp) -> AsyncIterator[None]:
    """Start ``app`` before the block and shut it down after it, with ASGI's lifespan protocol.

    Raises:
        RuntimeError: the application reported that it could not start or stop.
    """
    to_app: asyncio.Queue[Message] = asyncio.Queue()
    from_app: asyncio.Queue[Message] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}

    async def run() -> None:
        await app(scope, to_app.get, from_app.put)

    async def ask(what: str) -> None:
        await to_app.put({"type": f"lifespan.{what}"})
        answer = asyncio.create_task(from_app.get())
        await asyncio.wait({answer, task}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            await task  # raises what ended it
            raise RuntimeError(f"the application ended during {what}")
        if answer.result()["type"] != f"lifespan.{what}.complete":
            raise RuntimeError(f"the application failed during {what}: {answer.result().get('message', '')}")

    task = asyncio.create_task(run())
    try:
        await ask("startup")
        yield
        await ask("shutdown")
        await task
    finally:
        task.cancel()

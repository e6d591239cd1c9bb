"""A small OpenAI-like server on a free port, for tests of what talks to one."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class FakeServer:
    """Answers with an echo, word by word; remembers the bodies it was sent."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.bodies: list[dict[str, Any]] = []
        self.url = ""
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/server_info", self.info),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "echo"}]})

    async def info(self, request: Request) -> Response:
        return JSONResponse({"kernels": "cpp", "isa": "avx2"})

    async def chat(self, request: Request) -> Response:
        body = await self._receive(request)
        text = body["messages"][-1]["content"]
        if text == "refuse":
            return JSONResponse({"error": {"message": "no such thing [here]"}}, 400)
        return self._answer(
            body,
            text,
            lambda piece: {"delta": {"content": piece}},
            lambda all_: {"message": {"content": all_}},
        )

    async def complete(self, request: Request) -> Response:
        body = await self._receive(request)
        return self._answer(body, body["prompt"], lambda piece: {"text": piece}, lambda all_: {"text": all_})

    async def _receive(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.bodies.append(body)
        await asyncio.sleep(self.delay)
        return body

    def _answer(self, body: dict[str, Any], text: str, chunk: Any, whole: Any) -> Response:
        words = f"you said: {text}".split(" ")
        usage = {"prompt_tokens": 1, "completion_tokens": len(words)}
        if not body.get("stream"):
            return JSONResponse({"id": "x", "choices": [whole(" ".join(words))], "usage": usage})

        async def events() -> AsyncIterator[str]:
            yield ": ping\n\n"
            for number, word in enumerate(words):
                yield f"data: {json.dumps({'choices': [chunk((' ' if number else '') + word)]})}\n\n"
            if text == "break":
                yield 'data: {"error": {"message": "the engine broke"}}\n\n'
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


@contextlib.contextmanager
def running(delay: float = 0.0, fake: FakeServer | None = None) -> Iterator[FakeServer]:
    """A fake server, listening until the block ends."""
    fake = fake or FakeServer(delay)
    server = uvicorn.Server(uvicorn.Config(fake.app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the fake server did not start")
            threading.Event().wait(0.01)
        fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield fake
    finally:
        server.should_exit = True
        thread.join()

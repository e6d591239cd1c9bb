"""A proxy that computes each prompt on a prefill server and its answer on a decode server.

    python examples/disaggregated_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

See docs/guide/kv-transfer.md for the two servers. It takes servers in turn and streams. It passes the headers on that
name the tenant, so that both servers see the same one. If no prefill server answers, the decode server computes the
prompt. With ``--at-once`` both get a request at the same time, and the decode server pulls each part of the prompt when
it has been computed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

PASSED_ON = ("authorization", "x-tenant-id", "content-type")
NOT_FOR_PREFILL = ("stream_options", "max_completion_tokens", "min_tokens", "n", "best_of")


class Proxy:
    """Sends each request to a prefill server, for one token, and then, or ``at_once``, to a decode server."""

    def __init__(
        self, prefill: list[str], decode: list[str], client: httpx.AsyncClient, *, at_once: bool
    ) -> None:
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._client = client
        self._at_once = at_once
        # What each prefill server has said, which is always the same.
        self._known: dict[str, dict[str, Any]] = {}
        self._computing: set[asyncio.Task[Any]] = set()

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        params = await self._params(next(self._prefill), request.url.path, body, headers)
        if params is not None:
            body = body | {"kv_transfer_params": params}
        url = next(self._decode) + request.url.path
        asked = self._client.build_request("POST", url, json=body, headers=headers)
        answer = await self._client.send(asked, stream=True)

        async def content() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()

        return StreamingResponse(content(), answer.status_code, media_type=answer.headers.get("content-type"))

    async def _params(
        self, server: str, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """What the decode server needs to know; at once, if this prefill server has answered before."""
        computing = asyncio.create_task(self._compute_prompt(server, path, body, headers))
        if not self._at_once or server not in self._known:
            return await computing
        self._computing.add(computing)
        computing.add_done_callback(self._computing.discard)
        return self._known[server] | {"remote_prefill_runs": True}

    async def _compute_prompt(
        self, server: str, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """What the prefill server says to the decode server; None if there is no answer."""
        kept = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
        once = kept | {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        try:
            answer = await self._client.post(server + path, json=once, headers=headers)
            answer.raise_for_status()
        except httpx.HTTPError:
            return None
        params: dict[str, Any] | None = answer.json().get("kv_transfer_params")
        if params is not None:
            self._known[server] = params
        return params


def make_app(
    prefill: list[str], decode: list[str], client: httpx.AsyncClient, *, at_once: bool = False
) -> Starlette:
    """The proxy in front of these servers."""
    proxy = Proxy(prefill, decode, client, at_once=at_once)
    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(routes=[Route(path, proxy.answer, methods=["POST"]) for path in paths])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prefill", action="append", required=True, help="URL of a prefill server; repeatable"
    )
    parser.add_argument("--decode", action="append", required=True, help="URL of a decode server; repeatable")
    parser.add_argument("--at-once", action="store_true", help="send both requests at the same time")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    client = httpx.AsyncClient(timeout=600)
    app = make_app(given.prefill, given.decode, client, at_once=given.at_once)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")

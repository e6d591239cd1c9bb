"""Runs a batch through an HTTP client, for ``run-batch``.

The client sends requests to a server's address, or through `httpx.ASGITransport` to an application in this process.
`batch.batches` runs the batches of a server, without HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import httpx

from headrace.api.batch.lines import BadLine, BatchRequest, answered, refused, succeeded, used
from headrace.api.batch.work import Feed, Results, run_lines

BUSY = frozenset({429, 503})
BUSY_TRIES = 12
LOST_TRIES = 4
FIRST_WAIT_SECONDS = 0.5
MAX_WAIT_SECONDS = 60.0


class ServerGone(ConnectionError):
    """The server does not respond: the run ends, and the next run continues with the missing lines."""


class Outcome(NamedTuple):
    """The outcome of one line, for progress."""

    succeeded: bool
    prompt_tokens: int
    completion_tokens: int


async def run_batch(
    client: httpx.AsyncClient,
    lines: Iterator[BatchRequest | BadLine],
    results: Results,
    *,
    concurrency: int,
    ended: Callable[[Outcome], None],
    model: str | None = None,
) -> None:
    """Run all lines that have no result yet.

    Args:
        client: bound to the server (``base_url``), or to an application.
        lines: read ahead, and sent in the order that shares most prefixes.
        results: receives the results in the order in which they arrive.
        concurrency: number of concurrent requests.
        ended: called with each line's outcome after its result is written.
        model: sent instead of the lines' own ``model``.

    Raises:
        ServerGone: several attempts of a request could not reach the server, or its engine has failed.
    """
    await run_lines(
        Feed(lines, results.keys),
        results,
        partial(_send, client, model=model),
        concurrency=concurrency,
        ended=lambda result: ended(_outcome(result)),
    )


async def _send(client: httpx.AsyncClient, line: BatchRequest, *, model: str | None) -> dict[str, Any]:
    """Send until there is a response; a busy server is retried with increasing delays."""
    try:
        body = line.body if model is None else {**line.body, "model": model}
        request = client.build_request("POST", line.url, json=body)
    except (ValueError, RecursionError, httpx.InvalidURL) as error:  # NaN, a lone surrogate, nesting too deep
        return refused(BadLine(line.number, line.custom_id, f"line {line.number} cannot be sent: {error}"))
    wait = FIRST_WAIT_SECONDS
    busy = lost = 0
    while True:
        try:
            response = await client.send(request)
        except httpx.TransportError as error:
            lost += 1
            if lost == LOST_TRIES:
                raise ServerGone(f"no answer from {client.base_url}: {error!r}") from error
        else:
            if response.status_code == 500 and await _has_failed(client):
                raise ServerGone(f"the engine behind {client.base_url} has failed")
            busy += response.status_code in BUSY
            if response.status_code not in BUSY or busy == BUSY_TRIES:
                return answered(line, response.status_code, _request_id(response), _body(response))
            wait = max(wait, _retry_after(response))
        await asyncio.sleep(min(wait, MAX_WAIT_SECONDS))
        wait *= 2


async def _has_failed(client: httpx.AsyncClient) -> bool:
    """Whether a server error concerns all requests and not only this one."""
    try:
        return (await client.get("/health")).status_code == 503
    except httpx.TransportError:
        return True


def _body(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _request_id(response: httpx.Response) -> str:
    """The server's id of the request: from the header, or else the response's own id."""
    body = _body(response)
    fallback = body.get("id", "") if isinstance(body, dict) else ""
    return response.headers.get("x-request-id") or str(fallback)


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # HTTP also allows a date: use our own waits
        return 0.0


def _outcome(result: dict[str, Any]) -> Outcome:
    tokens = used(result)
    return Outcome(succeeded(result), tokens.prompt_tokens, tokens.completion_tokens)

"""One call to an embedding model or cross-encoder, from its admission to its result; and how it appears in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.request import FinishReason
from headrace.serve.embedding.job import EmbeddingFailed, EmbeddingJob
from headrace.serve.embedding.models import Values
from headrace.serve.embedding.worker import EmbeddingWorker
from headrace.serve.http.edge import CALLER
from headrace.serve.http.errors import failed, shutting_down, timed_out, turned_away
from headrace.serve.http.exchange import Exchange
from headrace.serve.http.generation.usage import usage
from headrace.serve.http.rate_limit_headers import rate_headers
from headrace.serve.http.replies import hung_up
from headrace.serve.service import Refused


class Disconnected(Exception):
    """The client closed the connection before the result was complete."""


class LoggedCall:
    """What access log and traces show of a call; see `serve.http.exchange.AnsweredCall`."""

    stream = False
    cache_note = ""
    first_token_at: float | None = None
    service_class = "default"

    def __init__(self, job: EmbeddingJob) -> None:
        self._job = job

    @property
    def finish_reasons(self) -> list[str]:
        """None: an embedding has no end of a text."""
        return []

    def cost(self) -> Mapping[str, Any]:
        """Nothing: the cost ledger divides the time of steps, and an embedding has none."""
        return {}

    def tokens(self) -> dict[str, Any]:
        """The tokens of the call."""
        return usage(self._job.tokens, 0, 0)


class Unsent(Response):
    """Sends nothing: the client is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass


async def compute(request: Request, worker: EmbeddingWorker, job: EmbeddingJob, timeout: float) -> Values:
    """The results of a call. It ends when the client disconnects, or after ``timeout`` seconds.

    Raises:
        ApiError: it was rejected, it failed, or the time is over.
        Disconnected: the client is gone.
    """
    exchange: Exchange | None = request.scope[CALLER].exchange
    if exchange is not None:
        exchange.opened(job.id, job.model.name, job.tenant, ())
    try:
        worker.submit(job)
    except Refused as refused:
        raise turned_away(refused.verdict, rate_headers(refused.rooms)) from None
    if exchange is not None:
        exchange.call = LoggedCall(job)
    gone = asyncio.ensure_future(hung_up(request.receive))
    why = FinishReason.CANCELLED
    try:
        awaited: Sequence[asyncio.Future[Any]] = (job.result, gone)
        done, _ = await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            why = FinishReason.TIMEOUT
            raise timed_out(timeout)
        if job.result not in done:
            raise Disconnected
        if job.result.cancelled():
            raise shutting_down()
        why = FinishReason.FAILED
        values = job.result.result()
        why = FinishReason.STOP
        return values
    except EmbeddingFailed:
        raise failed() from None
    finally:
        gone.cancel()
        worker.end(job, why)

"""One call to an embedding model or cross-encoder, from its admission to its result, and its access log fields."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.compile.call import usage
from headrace.api.embedding.calls import PoolingCall
from headrace.api.errors import failed, shutting_down, timed_out, turned_away
from headrace.api.exchange import Exchange
from headrace.api.rate_limit_headers import rate_headers
from headrace.core.request import FinishReason
from headrace.service.embedding.job import EmbeddingFailed
from headrace.service.embedding.models import Values
from headrace.service.embedding.worker import EmbeddingWorker
from headrace.service.service import Refused


class Disconnected(Exception):
    """The client closed the connection before the result was complete."""


class LoggedCall:
    """The fields of a call for the access log and traces; see `api.exchange.AnsweredCall`."""

    stream = False
    cache_note = ""
    first_token_at: float | None = None
    service_class = "default"

    def __init__(self, call: PoolingCall) -> None:
        self._call = call

    @property
    def finish_reasons(self) -> list[str]:
        """Always empty: embeddings have no finish reason."""
        return []

    def cost(self) -> Mapping[str, Any]:
        """The cost so far; empty if the client has not asked for it."""
        return self._call.cost()

    def tokens(self) -> dict[str, Any]:
        """The tokens of the call."""
        return usage(self._call.job.tokens, 0, 0)


class Unsent(Response):
    """Sends nothing, because the client has disconnected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass


async def compute(
    worker: EmbeddingWorker,
    call: PoolingCall,
    timeout: float,
    exchange: Exchange | None = None,
    hangs_up: Coroutine[Any, Any, None] | None = None,
) -> Values:
    """The results of a call, which ends after ``timeout`` seconds, or when ``hangs_up`` returns (client disconnected).

    ``exchange`` is the HTTP request of the call, if there is one.

    Raises:
        ApiError: the call was rejected, failed or timed out.
        Disconnected: the client has disconnected.
    """
    job = call.job
    if exchange is not None:
        exchange.opened(job.id, job.model.name, job.tenant, ())
    gone: asyncio.Future[None] = asyncio.ensure_future(hangs_up or _never())
    why = FinishReason.CANCELLED
    try:
        worker.submit(job)
        if exchange is not None:
            exchange.call = LoggedCall(call)
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
    except Refused as refused:
        raise turned_away(refused.verdict, rate_headers(refused.rooms)) from None
    except EmbeddingFailed:
        raise failed() from None
    finally:
        gone.cancel()
        worker.end(job, why)


async def _never() -> None:
    await asyncio.Event().wait()

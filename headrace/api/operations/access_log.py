"""The access log: one record for each HTTP request, at its end.

The record's fields are the columns of the log; `FIELDS` lists them. Health probes and metrics scrapes are logged at
debug level. A prompt, a header or a query string is never logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from headrace.api.exchange import DISCONNECTED, AnsweredCall, Exchange
from headrace.api.operations.status import Status

logger = logging.getLogger("headrace.access")

PROBES = frozenset(row.path for rows in Status.declared.values() for row in rows if row.metrics_port)
"""Health probes and metrics, which machines read every few seconds."""

BATCH_SECONDS = 0.1  # see docs/decisions/observability.md#access-log-in-batches
"""Maximum time that an exchange that has ended waits, so that several are logged together."""

MAX_HELD = 256
"""Maximum number of exchanges that wait."""

CLIENT_CLOSED = 499
"""The status logged for a request whose client disconnected before a response began, as in nginx."""

FIELDS = {
    "method": "HTTP method",
    "path": "path without its query string",
    "status": "HTTP status; 499 if the client disconnected before the response began",
    "request_id": "the client's `X-Request-Id`, or the one that the response carries",
    "id": "`id` of the completion",
    "trace_id": "W3C trace id, if the client sent `traceparent` or traces are exported",
    "tenant": "tenant: the API key's, `X-Tenant-Id`, or the field `user`",
    "model": "name of the served model",
    "service_class": "service class that the request ran in",
    "stream": "whether the response was streamed",
    "prompt_tokens": "tokens of the prompt",
    "completion_tokens": "tokens generated",
    "cached_tokens": "prompt tokens found in the prefix cache",
    "cost": "cost of the request, if the server has prices",
    "cache": "result of the response cache: `miss`, `coalesced`, `partial`, or the layer of the hit",
    "finish_reason": "`stop` or `length`; several choices separated by commas",
    "error": "error code, as in the body of the error; `client_disconnected` if the client disconnected",
    "ttft_seconds": "time to first token, from the request's arrival",
    "duration_seconds": "time from the request's arrival to the end of the response",
}
"""Every field of an access record, in its order. A field that does not apply is left out."""


class AccessLog:
    """Logs exchanges that have ended: those of `BATCH_SECONDS` together, on the event loop.

    A batch keeps the logging code in the CPU caches: a single record took 36 us of CPU time, in a batch it takes a
    third of that.
    """

    def __init__(self) -> None:
        self._ended: list[tuple[float, Exchange]] = []
        self._due: asyncio.TimerHandle | None = None

    def add(self, exchange: Exchange) -> None:
        """Log an exchange that has just ended, with the current batch."""
        self._ended.append((time.time(), exchange))
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(BATCH_SECONDS, self.flush)
        elif len(self._ended) >= MAX_HELD:
            self.flush()

    def flush(self) -> None:
        """Log what has ended so far."""
        if self._due is not None:
            self._due.cancel()
        self._due = None
        ended, self._ended = self._ended, []
        for at, exchange in ended:
            level = logging.DEBUG if exchange.route in PROBES else logging.INFO
            if logger.isEnabledFor(level):
                logger.handle(AccessRecord(level, at, exchange))


class AccessRecord(logging.LogRecord):
    """A log record made in a third of the time of `Logger.log`, which walks the stack and looks up the task's name.

    All records of one level differ only in their time and their fields.
    """

    def __init__(self, level: int, at: float, exchange: Exchange) -> None:
        vars(self).update(_COMMON[level])
        self.created = at
        self.msecs = int(at % 1 * 1000) + 0.0
        self.fields = access_fields(exchange)


_COMMON = {
    level: vars(logging.LogRecord(logger.name, level, __file__, 0, "request", (), None, "flush"))
    for level in (logging.DEBUG, logging.INFO)
}


def access_fields(exchange: Exchange) -> dict[str, Any]:
    """The fields of an exchange; None where a field does not apply. On the event loop only: the cost counts steps."""
    return {
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status or CLIENT_CLOSED,
        "request_id": exchange.request_id,
        "id": exchange.call_id or None,
        "trace_id": exchange.trace_id or None,
        "tenant": exchange.tenant or None,
        "model": exchange.model or None,
        **_call_fields(exchange.call),
        "error": exchange.error or (None if exchange.status else DISCONNECTED),
        **_times(exchange),
    }


def _call_fields(call: AnsweredCall | None) -> dict[str, Any]:
    if call is None:
        return {}
    tokens = call.tokens()
    return {
        "service_class": call.service_class,
        "stream": call.stream,
        "prompt_tokens": tokens["prompt_tokens"],
        "completion_tokens": tokens["completion_tokens"],
        "cached_tokens": tokens["prompt_tokens_details"]["cached_tokens"],
        "cost": call.cost().get("cost"),
        "cache": cache_layer(call.cache_note) or None,
        "finish_reason": ",".join(call.finish_reasons) or None,
    }


def _times(exchange: Exchange) -> dict[str, Any]:
    first = exchange.call.first_token_at if exchange.call else None
    return {
        "ttft_seconds": None if first is None else round(first - exchange.began, 6),
        "duration_seconds": round(exchange.ended - exchange.began, 6),
    }


def cache_layer(note: str) -> str:
    """The result of the response cache in one word, from the value of ``X-Headrace-Cache``."""
    outcome, *details = note.split("; ")
    layers = [each.removeprefix("layer=") for each in details if each.startswith("layer=")]
    return layers[0] if outcome == "hit" and layers else outcome

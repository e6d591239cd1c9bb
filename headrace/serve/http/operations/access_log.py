"""The access log: one record for each HTTP request, at its end.

The record's fields are the columns of the log; `FIELDS` lists them. Health probes and metrics scrapes are logged at
debug level. A prompt, a header or a query string is never logged.
"""

from __future__ import annotations

import logging
import time
from functools import cached_property
from typing import Any

from headrace.serve.http.exchange import DISCONNECTED, Exchange

logger = logging.getLogger("headrace.access")

PROBES = frozenset(
    {"/health", "/health/ready", "/healthz", "/livez", "/readyz", "/ping", "/metrics", "/version"}
)
"""Routes that machines read every few seconds."""

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
    "cache": "part that a response cache took: `miss`, `coalesced`, `partial`, or the layer of the hit",
    "finish_reason": "`stop` or `length`; several choices separated by commas",
    "error": "error code, as in the body of the error; `client_disconnected` if the client hung up",
    "ttft_seconds": "time to first token, from the request's arrival",
    "duration_seconds": "time from the request's arrival to the end of the response",
}
"""Every field of an access record, in its order. A field that does not apply is left out."""


def log_access(exchange: Exchange) -> None:
    """Log one exchange that has ended."""
    level = logging.DEBUG if exchange.route in PROBES else logging.INFO
    if logger.isEnabledFor(level):
        logger.handle(AccessRecord(level, exchange))


class AccessRecord(logging.LogRecord):
    """A log record made in a third of the time of `Logger.log`, which walks the stack and asks for the task's name.

    All records of one level differ only in their time and their fields. The thread that writes the log makes the
    fields, so these only read an exchange that has ended.
    """

    def __init__(self, level: int, exchange: Exchange) -> None:
        vars(self).update(_COMMON[level])
        self.created = now = time.time()
        self.msecs = int(now % 1 * 1000) + 0.0
        self._exchange: Exchange | None = exchange
        self._cost = cost_of(exchange)  # now, since only this thread may count steps

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The columns of the log; from the first use on, the exchange is no longer held."""
        exchange, self._exchange = self._exchange, None
        assert exchange
        return access_fields(exchange, self._cost)


_COMMON = {
    level: vars(logging.LogRecord(logger.name, level, __file__, 0, "request", (), None, "log_access"))
    for level in (logging.DEBUG, logging.INFO)
}


def cost_of(exchange: Exchange) -> float | None:
    """The cost of an exchange's call; None without a call or without prices."""
    return exchange.call.cost().get("cost") if exchange.call else None


def access_fields(exchange: Exchange, cost: float | None) -> dict[str, Any]:
    """The fields of an exchange and its `cost_of`; None where a field does not apply."""
    return {
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status or CLIENT_CLOSED,
        "request_id": exchange.request_id,
        "id": exchange.call_id or None,
        "trace_id": exchange.trace_id or None,
        "tenant": exchange.tenant or None,
        "model": exchange.model or None,
        **_call_fields(exchange, cost),
        "error": exchange.error or (None if exchange.status else DISCONNECTED),
        **_times(exchange),
    }


def _call_fields(exchange: Exchange, cost: float | None) -> dict[str, Any]:
    call = exchange.call
    if call is None:
        return {}
    tokens = call.tokens()
    return {
        "service_class": call.service_class,
        "stream": call.stream,
        "prompt_tokens": tokens["prompt_tokens"],
        "completion_tokens": tokens["completion_tokens"],
        "cached_tokens": tokens["prompt_tokens_details"]["cached_tokens"],
        "cost": cost,
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
    """The response cache's part in one word, from the value of ``X-Headrace-Cache``."""
    outcome, *details = note.split("; ")
    layers = [each.removeprefix("layer=") for each in details if each.startswith("layer=")]
    return layers[0] if outcome == "hit" and layers else outcome

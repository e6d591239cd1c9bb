"""Compiles a logged request as the server would, up to the caches, for an estimate of what they would save.

The stages are those of every request. Instead of the caches and the engine, `_Compiled` ends them. Requests are read
one at a time: JSON lines, with or without times, or a server's request history.

```
a body         {"messages": […], "temperature": 0, …}                       chat; with "prompt": a text completion
a batch line   {"url": "/v1/chat/completions", "body": {…}, "custom_id": …, "method": "POST"}
a log line     a batch line with any of "timestamp", "tenant", "seconds", "output_tokens", "response"
a history      the SQLite file of --history-file, for requests recorded with --record-history
```
A line that cannot be read becomes a `BadLine`, and the lines after it are read on.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from headrace.api.batch.line_runner import OPENED
from headrace.api.batch.lines import BadLine, used
from headrace.api.body import parse
from headrace.api.compile.model import ServedModel
from headrace.api.errors import ApiError
from headrace.api.exchange import Caller
from headrace.core.constraint import UnusableConstraint, WrittenFloat, json_text
from headrace.core.prediction.output_lengths import prior_tokens
from headrace.core.request import FinishReason, InvalidParameter, Request
from headrace.response_cache.estimate import LoggedCall, Sent
from headrace.response_cache.history import read_recorded
from headrace.response_cache.lookup import keyed
from headrace.response_cache.query import LookupRequest
from headrace.response_cache.rules.key import digest
from headrace.service.answer import Answer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

FIELDS = (
    *("url", "body", "custom_id", "method"),
    *("timestamp", "tenant", "seconds", "output_tokens", "response"),
)
"""The fields of a line around a body."""

LATEST = 1e11
"""The largest time in seconds; a larger timestamp is in milliseconds."""

_SQLITE, _GZIP = b"SQLite format 3\0", b"\x1f\x8b"


class NoTexts(ValueError):
    """A file that holds no texts of requests."""


class LoggedRequest(NamedTuple):
    """One request of a log, sent ``times`` times.

    ``number`` is its line or row, from 1. ``timestamp`` is the Unix time of its arrival and ``seconds`` the time until
    its response was complete; ``output_tokens`` counts those of all choices. None: not in the log.
    """

    number: int
    url: str
    body: Mapping[str, Any]
    key_id: str | None = None
    tenant: str | None = None
    timestamp: float | None = None
    seconds: float | None = None
    output_tokens: int | None = None
    times: int = 1


class _Wrong(ValueError):
    """What is wrong with a line."""


def read_log(path: Path, max_line_bytes: int, trace_key: str) -> Iterator[LoggedRequest | BadLine]:
    """The requests of a file, in its order; longer lines are bad. A scheduler trace begins with ``trace_key``.

    Raises:
        NoTexts: it is a scheduler trace, or a history without texts.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        begins = file.read(len(_SQLITE))
    if begins == _SQLITE:
        yield from _history(path)
        return
    with gzip.open(path) if begins.startswith(_GZIP) else path.open("rb") as raw_lines:
        for number, raw in _lines(raw_lines.readline, max_line_bytes):
            if len(raw) > max_line_bytes:
                yield _bad(number, f"longer than {max_line_bytes} bytes")
            elif raw.strip():
                yield _read(number, raw, trace_key)


def _lines(readline: Callable[[int], bytes], most: int) -> Iterator[tuple[int, bytes]]:
    """Numbered lines; of a longer one only the first ``most`` + 1 bytes."""
    number = 0
    while raw := readline(most + 1):
        number += 1
        yield number, raw
        while len(raw) > most and not raw.endswith(b"\n"):
            raw = readline(most + 1)
            if not raw:
                return


def _read(number: int, raw: bytes, trace_key: str) -> LoggedRequest | BadLine:
    try:
        value = json.loads(raw, parse_float=WrittenFloat)
    except (ValueError, RecursionError) as error:
        return _bad(number, f"not valid JSON ({error})")
    if not isinstance(value, dict):
        return _bad(number, "expected a JSON object")
    if number == 1 and trace_key in value:
        raise NoTexts(
            "the file is a scheduler trace (--record-trace), which holds no texts and no sampling parameters; "
            "record requests with --history-file FILE --record-history"
        )
    try:
        return _request(number, value)
    except _Wrong as wrong:
        return _bad(number, str(wrong))


def _request(number: int, value: Mapping[str, Any]) -> LoggedRequest:
    if "body" not in value:
        return LoggedRequest(number, _url(value), value)
    if unknown := value.keys() - {*FIELDS}:
        raise _Wrong(f"unknown field {min(unknown)!r:.200} beside body; known are {', '.join(FIELDS)}")
    body, url = value["body"], value.get("url")
    if not isinstance(body, dict):
        raise _Wrong("body must be a JSON object")
    if url is not None and not isinstance(url, str):
        raise _Wrong("url must be text")
    tenant = value.get("tenant")
    if tenant is not None and (not isinstance(tenant, str) or not tenant):
        raise _Wrong("tenant must be text that is not empty")
    return LoggedRequest(
        number,
        url or _url(body),
        body,
        tenant=tenant,
        timestamp=_timestamp(value.get("timestamp")),
        seconds=_number(value, "seconds"),
        output_tokens=_output_tokens(value),
    )


def _url(body: Mapping[str, Any]) -> str:
    if "messages" in body:
        return CHAT
    if "prompt" in body:
        return COMPLETION
    raise _Wrong("none of body, messages, prompt")


def _timestamp(value: object) -> float | None:
    """Unix seconds, or a date and time of ISO 8601; without a time zone it is UTC."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            raise _Wrong(f"timestamp {value!r:.200} is not a time of ISO 8601") from None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST:
        raise _Wrong("timestamp must be a Unix time in seconds, or a time of ISO 8601")
    return float(value)


def _number(value: Mapping[str, Any], name: str) -> float | None:
    given = value.get(name)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= LATEST:
        raise _Wrong(f"{name} must be a number of at least 0")
    return float(given)


def _output_tokens(value: Mapping[str, Any]) -> int | None:
    """Those that the line gives, or else its response's ``usage``."""
    given = value.get("output_tokens")
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise _Wrong("output_tokens must be an integer of at least 0")
        return given
    response = value.get("response")
    if response is None:
        return None
    if not isinstance(response, dict):
        raise _Wrong("response must be an object with status_code and body, as in a batch's results")
    try:
        return used({"response": response}).completion_tokens or None
    except (TypeError, ValueError):
        raise _Wrong("response.body.usage must have counts of tokens") from None


def _bad(number: int, why: str) -> BadLine:
    return BadLine(number, None, f"line {number}: {why}")


def _history(path: Path) -> Iterator[LoggedRequest | BadLine]:
    """The requests of a server's history: each once, with its number of times and without its times of arrival."""
    found = False
    for number, (recorded, times, tokens) in enumerate(read_recorded(path), start=1):
        found = True
        try:
            body = json.loads(recorded.body, parse_float=WrittenFloat)
        except (ValueError, RecursionError) as error:
            yield _bad(number, f"not valid JSON ({error})")
            continue
        yield LoggedRequest(
            number,
            recorded.url,
            body,
            recorded.key_id,
            recorded.tenant_header,
            output_tokens=tokens or None,
            times=times,
        )
    if not found:
        raise NoTexts("the history holds no texts of requests; record them with --record-history")


class NotEstimated(ValueError):
    """A request that the server would refuse, or that the caches do not answer."""


class _Lookups(Exception):
    """The sequences of a call, which has been compiled."""

    def __init__(self, lookups: Sequence[LookupRequest]) -> None:
        super().__init__()
        self.lookups = lookups


class _Compiled:
    """An `api.compile.call.Answers` that answers nothing: it raises `_Lookups`."""

    def now(self) -> float:
        return 0.0

    async def open(
        self, lookups: Sequence[LookupRequest], /, interval: int = 1, paced: bool = False
    ) -> NoReturn:
        raise _Lookups(lookups)

    def close(self, answer: Answer, why: FinishReason = FinishReason.CANCELLED) -> None:
        raise AssertionError("no call was opened")

    def stop_sequence(self, answer: Answer, index: int) -> None:
        raise AssertionError("no call was opened")


async def compile_call(
    model: ServedModel,
    logged: LoggedRequest,
    *,
    tenant: str | None,
    output_len: int | None,
    similar: bool,
    request_timeout: float,
) -> LoggedCall:
    """The call of a logged request.

    Args:
        model: the served model, whose name the request need not have: models never share a response.
        logged: the request.
        tenant: of all requests (None: each one's own, as on a server without API keys).
        output_len: tokens of an output whose length is not logged (None: the mean that the scheduler expects).
        similar: make the keys of the semantic cache too.
        request_timeout: the server's.

    Raises:
        NotEstimated: the server would refuse it, or it is of another endpoint.
    """
    endpoint = OPENED.get(logged.url)
    if endpoint is None:
        raise NotEstimated(f"{logged.url} is not estimated; {' and '.join(OPENED)} are")
    caller = Caller(tenant or logged.key_id, logged.tenant)
    try:
        raw = json_text(logged.body, "the body").encode("utf-8", "surrogatepass")
        body = parse(raw, endpoint.form, endpoint.not_yet)
        await endpoint.open(_Compiled(), model, body, caller, request_timeout)
    except _Lookups as compiled:
        lookups = compiled.lookups
    except ApiError as error:
        raise NotEstimated(f"the server would answer {error.status}: {error}") from None
    except (InvalidParameter, UnusableConstraint) as error:
        raise NotEstimated(f"the server would answer 400: {error}") from None
    else:
        raise AssertionError("a call ends in _Compiled.open")
    name = model.name if body.model in (None, *model.names) else body.model
    fingerprint = digest("estimate", name)
    known = None if logged.output_tokens is None else logged.output_tokens / len(lookups)
    sequences = [
        Sent(
            keyed(each, fingerprint, similar=similar),
            _expected(each.request, output_len) if known is None else known,
        )
        for each in lookups
    ]
    return LoggedCall(sequences, fingerprint, logged.timestamp, logged.seconds, logged.times)


def _expected(request: Request, output_len: int | None) -> float:
    """The length of an output that is not logged, within the limit of its request."""
    limit = float("inf") if request.params.max_tokens is None else float(request.params.max_tokens)
    return prior_tokens(limit) if output_len is None else min(output_len, limit)

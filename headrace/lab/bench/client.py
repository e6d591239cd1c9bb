"""The load generator: a lean streaming client of the OpenAI API, and requests offered at given times.

The same client measures every server. It shares the CPU with a server on the same machine, so httptools parses, a
sending task resumes only when its response is complete, and chunks are parsed only after all responses have ended.
An incomplete response counts as failed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from headrace.lab.bench.stats import Record, wrong_length
from headrace.lab.workload.work import Work, is_chat

DELTAS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a chat chunk that carry output; reasoning and tool calls are generated like text."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address, model and options of requests. ``extra`` is added to every body (``{"return_token_ids": true}`` ...)."""

    url: str
    model: str
    api_key: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 600.0

    def address(self, work: Work) -> str:
        path = "chat/completions" if is_chat(work.prompt) else "completions"
        return f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}"

    def headers(self, work: Work) -> dict[str, str]:
        """Headers: the API key, and the tenant if the workload has one."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return headers | ({"X-Tenant-Id": work.tenant} if work.tenant != "default" else {})

    def body(self, work: Work) -> dict[str, Any]:
        """The request as JSON; fields that are not OpenAI's are added only if the work needs them."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": work.max_tokens,
            "temperature": work.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if isinstance(work.prompt, str):
            body["prompt"] = work.prompt
        elif is_chat(work.prompt):
            body["messages"] = [message._asdict() for message in work.prompt]
        else:
            body["prompt"] = list(work.prompt)
        if work.ignore_eos:
            body["ignore_eos"] = True
        if work.service_class != "default":
            body["service_tier"] = work.service_class
        return {**body, **self.extra}


class Answer:
    """The stream of one response, fed piece by piece with times. Its content is known after `read`."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.finish_reason = ""
        self.error = ""
        self.done = False
        self._pieces: list[tuple[bytes, float]] = []
        self._pending = b""
        self._token_ids = 0
        self._generated = False
        self._ends = 0
        self._ended: float | None = None
        self._began: float | None = None
        self._prompt_tokens = self._output_tokens = self._cached_tokens = 0

    def feed(self, data: bytes, now: float) -> None:
        """Takes bytes as they arrive from the network."""
        self._pieces.append((data, now))

    def read(self) -> None:
        """Parses the bytes that were fed; a chunk counts when its line is complete."""
        pieces, self._pieces = self._pieces, []
        for data, now in pieces:
            lines = (self._pending + data).split(b"\n")
            self._pending = lines.pop()
            carried, ends, self._generated = False, self._ends, False
            for line in lines:
                line = line.rstrip(b"\r")
                if line.startswith(b"data:") and self._chunk(line[5:].strip()):
                    carried = True
            if carried:
                self.times.append(now)
            if self._ends > ends:
                self._ended = now
            if self._generated and self._began is None:
                self._began = now

    def _chunk(self, payload: bytes) -> bool:
        """Parses one event; returns whether it carried output."""
        if payload == b"[DONE]":
            self.done = True
            return False
        try:
            chunk = json.loads(payload)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self.error = self.error or f"not a JSON object: {payload[:80]!r}"
            return False
        if error := chunk.get("error"):  # some servers send an object, as OpenAI does, others only the text
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return False
        if usage := chunk.get("usage"):
            self._prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self._output_tokens = int(usage.get("completion_tokens") or 0)
            details = usage.get("prompt_tokens_details") or {}
            self._cached_tokens = int(details.get("cached_tokens") or 0)
        carried = False
        for choice in chunk.get("choices") or ():
            if reason := choice.get("finish_reason"):
                self.finish_reason, self._ends = reason, self._ends + 1
            token_ids = choice.get("token_ids") or ()
            self._token_ids += len(token_ids)
            delta = choice.get("delta") or {}
            # A chunk that only names the role comes before any token; all others follow a token.
            self._generated = self._generated or bool(reason) or "role" not in delta
            parts = (token_ids, choice.get("text"), *(delta.get(part) for part in DELTAS))
            carried = carried or any(parts)
        return carried

    def record(self, work: Work, arrived: float, finished: float, error: str = "") -> Record:
        """The record of the request once the stream has ended; an incomplete stream is an error."""
        try:
            self.read()
        except Exception as odd:  # one malformed response must not end the measurement
            self.error = self.error or f"an event that cannot be read: {type(odd).__name__}: {odd}"
        error = error or self.error
        if not error and not (self.done and self.finish_reason):
            error = "the stream ended without a finish_reason and [DONE]"
        output = self._output_tokens or self._token_ids or len(self.times)
        if not error and self._token_ids and output != self._token_ids:
            error = f"usage says {output} tokens, the stream carried {self._token_ids}"
        error = error or wrong_length(work, output)
        times = tuple(self.times)
        if not times and output and self._began is not None:
            times = (
                self._began,
            )  # no token decoded to text: the first chunk after the role marks the first token
        return Record(
            id=work.id,
            arrived=arrived,
            finished=finished,
            token_seconds=times,
            ended=self._ended,
            prompt_tokens=self._prompt_tokens,
            output_tokens=output,
            cached_tokens=self._cached_tokens,
            finish_reason=self.finish_reason,
            error=error,
            tenant=work.tenant,
            service_class=work.service_class,
        )


async def ask(
    connections: Connections,
    endpoint: Endpoint,
    work: Work,
    arrived: float,
    clock: Callable[[], float],
) -> Callable[[], Record]:
    """Sends one request; returns a function that makes its record, to be called after the measurement.

    Errors of the server are recorded, not raised.
    """
    answer = Answer()
    refusal: list[bytes] = []

    def receive(status: int, data: bytes) -> None:
        if status == 200:
            answer.feed(data, clock())
        else:
            refusal.append(data)

    path = urlsplit(endpoint.address(work)).path
    body = json.dumps(endpoint.body(work)).encode()
    try:
        async with asyncio.timeout(endpoint.timeout_seconds):
            status = await connections.post(path, endpoint.headers(work), body, receive)
    except Exception as error:  # one failed request must not end the others
        return partial(answer.record, work, arrived, clock(), f"{type(error).__name__}: {error}")
    why = b"".join(refusal).decode(errors="replace")[:500]
    return partial(answer.record, work, arrived, clock(), "" if status == 200 else f"HTTP {status}: {why}")


Receiver = Callable[[int, bytes], None]
"""Called with the status and a piece of the body."""


class Connection(asyncio.Protocol):
    """One connection; one request at a time. ``began`` says whether any byte of the response has arrived."""

    def __init__(self) -> None:
        self.usable = True
        self.began = False
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._status = 0
        self._framed = (
            False  # headers give the length or chunked encoding; otherwise the body ends with the connection
        )
        self._receiver: Receiver | None = None
        self._response: asyncio.Future[int] | None = None

    async def send(self, request: bytes, receiver: Receiver) -> int:
        """Sends a request; returns the status when its response is complete.

        Raises:
            ConnectionError: the connection ended before the response did, or the response is not HTTP.
        """
        assert self._transport is not None
        self._status, self._framed, self.began, self._receiver = 0, False, False, receiver
        self._response = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._response

    def close(self) -> None:
        """Closes the connection at once."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not inherit from it

    def data_received(self, data: bytes) -> None:
        self.began = True
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:  # its context is the receiver's error, if the receiver raised one
            self._end(
                error.__context__
                if isinstance(error.__context__, Exception)
                else ConnectionError(f"not HTTP: {error}")
            )
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._status and not self._framed and exc is None:
            self._end(None)
        else:
            self._end(
                exc or ConnectionResetError("the server closed the connection before the end of the response")
            )

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver(self._status, data)

    def on_message_complete(self) -> None:
        if self._status >= 200:  # 1xx responses are interim
            self.usable = self._parser.should_keep_alive()
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        response, self._response, self._receiver = self._response, None, None
        if response is None or response.done():
            return
        if error is None:
            response.set_result(self._status)
        else:
            response.set_exception(error)


class Connections:
    """A pool of connections to one server, one per concurrent request; reused while the server keeps them open.

    Only scheme, host and port of ``url`` count.

    Raises:
        ValueError: the URL is not an HTTP URL.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL like http://host:port, got {url!r}")
        self._host, self._authority = parts.hostname, parts.netloc.rpartition("@")[2]
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._idle: list[Connection] = []

    async def post(self, path: str, headers: dict[str, str], body: bytes, receiver: Receiver) -> int:
        """Posts a JSON body to ``path``; passes each piece of the response to ``receiver`` and returns the status.

        Servers close idle connections without notice, also while the next request is on its way (RFC 9112, section
        9.3.1). A request whose reused connection ends before any byte of the response is sent once more, on a new
        connection. Generating text twice does no harm, so this holds for a POST too.

        Raises:
            OSError: no connection, or it ended before the response did.
            ValueError: a header contains a line break.
        """
        lines = {
            "Host": self._authority,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
        }
        lines |= headers
        if any("\r" in line or "\n" in line for line in (path, *lines.values())):
            raise ValueError("a path or header must not contain line breaks")
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        request = f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body
        connection = self._reusable()
        if connection is not None:
            try:
                return await self._send(connection, request, receiver)
            except OSError:
                if connection.began:
                    raise
        return await self._send(await self._open(), request, receiver)

    async def _send(self, connection: Connection, request: bytes, receiver: Receiver) -> int:
        try:
            status = await connection.send(request, receiver)
        except BaseException:
            connection.close()
            raise
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return status

    def close(self) -> None:
        """Closes all idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _reusable(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl))[1]


if sys.platform == "win32":
    from asyncio import run as run_loop
else:
    from uvloop import run as run_loop  # the client takes CPU time from a server on the same machine


async def offer(
    endpoint: Endpoint,
    work: Sequence[Work],
    concurrency: int | None = None,
    completed: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Sends all of ``work`` and waits for every response; records are in the order of ``work``.

    ``concurrency`` limits the open requests. If all requests are due at the start, this is a closed loop, and a
    request's times count from when it is sent. ``completed`` is called when a request has ended.

    Raises:
        ValueError: the endpoint's URL is not an HTTP URL.
    """
    slots = asyncio.Semaphore(concurrency if concurrency is not None else len(work) or 1)
    closed = concurrency is not None and all(each.arrival == 0.0 for each in work)
    connections = Connections(endpoint.url)
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    async def send(each: Work) -> Callable[[], Record]:
        await asyncio.sleep(max(0.0, each.arrival - clock()))
        async with slots:
            arrived = clock() if closed else each.arrival
            record = await ask(connections, endpoint, each, arrived, clock)
            completed()
            return record

    try:
        seen = await asyncio.gather(*(send(each) for each in work))
    finally:
        connections.close()
    return [record() for record in seen]


class ServerTarget:
    """A `stats.Target` behind a URL; ``before`` is called before every run, ``kernels`` is what the server reports."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        concurrency: int | None = None,
        before: Callable[[], object] = lambda: None,
        kernels: str = "",
    ) -> None:
        self.name = name
        self.completed = 0
        self._endpoint = endpoint
        self._concurrency = concurrency
        self._before = before
        self._kernels = {"kernels": kernels} if kernels else {}

    def run(self, work: Sequence[Work]) -> list[Record]:
        self._before()
        self.completed = 0
        return run_loop(offer(self._endpoint, work, self._concurrency, self._count))

    def _count(self) -> None:
        self.completed += 1

    def facts(self) -> dict[str, Any]:
        limit = {} if self._concurrency is None else {"max_concurrency": self._concurrency}
        return self._kernels | limit

    def close(self) -> None:
        """Does nothing: no connection stays open between runs."""
